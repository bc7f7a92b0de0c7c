"""A real local Ray cluster: starts its driver, starts the cluster, reads the driver's result.

A driver is a separate script, because Ray's workers inherit the driver's environment. The driver
prints its result in one line that begins with ``FOUND``.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from .rank_server import Ranks

ROOT = Path(__file__).resolve().parents[2]
LOG = "TEST_RAY_LOG"
"""If this variable is set, the workers' output is shown."""


QUIET = {
    "RAY_AUTH_MODE": "disabled",  # otherwise Ray writes a token to the user's home
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",  # a worker for each CPU, which no test uses
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_worker_register_timeout_seconds": "300",
}
"""Ray's variables in a test: nothing is written or sent, and a busy machine of two cores, which
needs more time than Ray's default, has it."""


def drive(
    ranks: Ranks,
    script: Path,
    *arguments: object,
    paths: tuple[Path, ...] = (),
    timeout: float,
    **variables: str,
) -> dict[str, Any]:
    """What a driver found.

    Args:
        ranks: a server whose ranks run scripts.
        script: the driver.
        *arguments: its own.
        paths: folders in the driver's ``PYTHONPATH`` before this repository.
        timeout: seconds after which the driver is killed.
        **variables: the driver's variables, beside all inherited variables except the shim's and
            Ray's.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PRECISION_SHIM", "RAY_", "PYTHONPATH"))
    }
    environment = {
        **inherited,
        **QUIET,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(str(one) for one in (*paths, ROOT)),
        **variables,
    }
    ranks(
        "script",
        world=1,
        timeout=timeout,
        arguments=[str(script), *(str(one) for one in arguments)],
        environment=environment,
        cwd=str(ROOT),
        workers=True,
    )
    lines = [line for line in ranks.said[0].splitlines() if line.startswith("FOUND ")]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("FOUND "))
    return found


def tell(find: Callable[[], Any]) -> None:
    """Print what a driver finds; after an error end its process, with no other clean-up."""
    try:
        print("FOUND " + json.dumps(find()), flush=True)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


@contextlib.contextmanager
def older(num_cpus: int, **options: Any) -> Iterator[None]:
    """A cluster that was started before the driver's job, without the shim's variables.

    ``RAY_ADDRESS`` names it, so that a framework's own ``ray.init`` connects to it.

    Args:
        num_cpus: number of CPUs.
        **options: of ``ray.init``, ready for JSON.
    """
    for _ in range(3):  # on a busy machine a node may end because its agent starts too late
        cluster, address = _started({"num_cpus": num_cpus, **options})
        if address:
            break
        cluster.communicate(timeout=120)
    assert address, "Ray has not started"
    os.environ["RAY_ADDRESS"] = address
    try:
        yield
    finally:
        os.environ.pop("RAY_ADDRESS", None)
        cluster.communicate(timeout=120)


def _started(options: dict[str, Any]) -> tuple[subprocess.Popen[str], str]:
    """Start a process with a cluster; returns it and the cluster's address, empty if it ended."""
    # Ray would count only GPUs that CUDA_VISIBLE_DEVICES names.
    but = ("PRECISION_SHIM", "CUDA_VISIBLE_DEVICES")
    cluster = subprocess.Popen(
        [sys.executable, "-m", __name__, json.dumps(options)],
        env={name: value for name, value in os.environ.items() if not name.startswith(but)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert cluster.stdout is not None
    lines = (line for line in cluster.stdout if line.startswith("ADDRESS "))
    return cluster, next(lines, "ADDRESS").removeprefix("ADDRESS").strip()


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Let ``ray.init`` leave out the processes that scale a cluster and show its logs.

    Each imports as much as a worker.
    """
    from ray._private.node import Node

    names = ["start_monitor"]
    if LOG not in os.environ:
        names.append("start_log_monitor")
    with mock.patch.multiple(Node, **dict.fromkeys(names, lambda *_, **__: None)):
        yield


def start(num_cpus: int, **options: Any) -> None:
    """Start the cluster; the driver calls this function."""
    import ray

    with unwatched():
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            log_to_driver=LOG in os.environ,
            object_store_memory=100_000_000,
            _temp_dir=tempfile.mkdtemp(prefix="ray", dir="/tmp"),
            **options,
        )


def _wait(options: dict[str, Any]) -> None:
    import ray

    start(**options)
    print("ADDRESS", ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    _wait(json.loads(sys.argv[1]))
