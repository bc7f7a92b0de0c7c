"""A driver whose framework starts a Ray worker with the shim, and then one without the package.

As a script, with the name of a maker, it prints what the driver was told in each of two jobs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..processes.ray_cluster import QUIET, start, tell

ROOT = Path(__file__).resolve().parents[2]
HIDES = "import sys\nsys.modules['precision_shim'] = None\n"
"""A ``sitecustomize`` with which an import of the package fails, as where it is not installed."""


def told_of_workers(framework: str, *paths: Path) -> None:
    """Assert that a driver is silent about a worker with the shim, and tells of one without.

    ``paths`` are folders in ``PYTHONPATH`` before this repository.
    """
    own = ("PRECISION_SHIM", "RAY_")
    environment = {name: one for name, one in os.environ.items() if not name.startswith(own)}
    path = os.pathsep.join(str(one) for one in (*paths, ROOT))
    done = subprocess.run(
        [sys.executable, "-m", __name__, framework],
        env={**environment, **QUIET, "PYTHONPATH": path, "PRECISION_SHIM": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stdout + done.stderr
    assert_told(json.loads(lines[-1].removeprefix("FOUND ")), framework)


def assert_told(found: list[list[str]], framework: str) -> None:
    """Assert that nothing was said before the worker without the package, and one line of it."""
    silent, told = found
    assert silent == []
    (text,) = told
    assert f": {framework}." in text
    assert "the package is not installed there" in text


def verl() -> Any:
    """verl's own worker group, with one worker of verl's base class."""
    import ray
    from examples.processes import ports
    from verl.single_controller.base import Worker
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.single_controller.ray.base import create_colocated_worker_cls

    given = {"actor": RayClassWithInitArgs(cls=ray.remote(Worker))}
    return RayWorkerGroup(
        resource_pool=RayResourcePool([1], use_gpu=False, max_colocate_count=1),
        ray_cls_with_init=create_colocated_worker_cls(given),
        device_name="cpu",
        master_port_range=ports.a_range(),
    )


def listen() -> list[str]:
    """A list, which grows by each warning about a process that this driver starts on Ray."""
    told: list[str] = []

    def show(message: Any, *_: Any, **__: Any) -> None:
        if "started on Ray" in str(message):
            told.append(str(message))

    warnings.simplefilter("always")
    warnings.showwarning = show
    return told


def _heard() -> None:
    """Wait until each process that was asked has answered."""
    import ray

    from precision_shim.process import session

    while session._current.actors._waiting:
        ray.get(ray.put(time.sleep(0.05)))


def without_the_package(told: list[str], make: Callable[[dict[str, Any]], Any]) -> list[list[str]]:
    """Start a worker that cannot import the package; what was told before it, and because of it.

    Args:
        told: the list of ``listen``, from before this driver started its workers.
        make: starts the worker in a runtime environment.
    """
    _heard()
    before = [*told]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(HIDES)
        path = os.pathsep.join((folder, os.environ["PYTHONPATH"]))
        made = make({"env_vars": {"PYTHONPATH": path}})
        _heard()
        del made
    return [before, told[len(before) :]]


def main(make: Callable[[], Any]) -> list[list[str]]:
    """Start two jobs; return what this driver was told in each of them."""
    import ray

    import precision_shim

    found = []
    path = os.environ["PYTHONPATH"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(HIDES)
        for one in (path, os.pathsep.join((folder, path))):
            told = listen()
            precision_shim.install()
            start(2, runtime_env={"env_vars": {"PYTHONPATH": one}})
            made = make()
            _heard()
            found.append(told)
            del made
            ray.shutdown()
    return found


if __name__ == "__main__":
    tell(lambda: main(globals()[sys.argv[1]]))
