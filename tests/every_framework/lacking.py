"""A driver whose framework starts a Ray worker with the shim, and then one without the package.

Run as a script, with the name of a maker. It prints what the driver was told in each of two jobs.
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
    silent, told = json.loads(lines[-1].removeprefix("FOUND "))
    assert silent == []
    (text,) = told
    assert f": {framework}." in text
    assert "the package is not installed there" in text


def answers() -> list[str]:
    """A list that gets the name of each process on Ray whose answer this driver reads."""
    from precision_shim.process import session

    found: list[str] = []
    if session._current is None:
        return found
    actors = session._current.actors
    judge = actors._judge

    def noted(name: str, *answer: Any) -> None:
        found.append(name)
        judge(name, *answer)

    actors._judge = noted  # type: ignore[method-assign]
    return found


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


def skyrl() -> Any:
    """SkyRL's own policy worker, started as its actor group does, but without a GPU."""
    from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import PolicyWorker
    from skyrl.train.config import SkyRLTrainConfig

    where = ("local_rank", "master_addr", "master_port")
    return PolicyWorker.options(num_cpus=0, num_gpus=0).remote(
        cfg=SkyRLTrainConfig.from_cli_overrides([]).trainer,
        world_size=1,
        rank=0,
        **dict.fromkeys(where),
        sequence_parallel_size=1,
    )


def nemo_rl() -> Any:
    """NeMo-RL's own actor in the environment of a worker, which would start the worker."""
    from nemo_rl.distributed.worker_groups import RayWorkerBuilder

    from tests.nemo_rl.support import NAMES

    return RayWorkerBuilder.IsolatedWorkerInitializer.remote(NAMES["v2"].replace(":", "."))


def main(make: Callable[[], Any]) -> list[list[str]]:
    """Start two jobs; return what this driver was told in each of them."""
    import ray

    import precision_shim
    from precision_shim.process import session

    found = []
    path = os.environ["PYTHONPATH"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(HIDES)
        for one in (path, os.pathsep.join((folder, path))):
            told: list[str] = []
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *_, told=told, **__: told.append(str(message))
            precision_shim.install()
            start(2, runtime_env={"env_vars": {"PYTHONPATH": one}})
            made = make()
            actors = session._current.actors
            assert actors._waiting or told
            while actors._waiting:
                ray.get(ray.put(time.sleep(0.05)))
            found.append([one for one in told if "started on Ray" in one])
            del made
            ray.shutdown()
    return found


if __name__ == "__main__":
    tell(lambda: main(globals()[sys.argv[1]]))
