"""Ranks for the tests, forked by one process that has imported what they need.

Forking saves time, because importing a framework takes longer than a test's training. A module
whose ranks this server starts has two functions: ``prepare()`` imports what its ranks need, in the
server. ``run(launch)`` is a rank's whole program, and returns values that JSON can store; without
it the program is the module's function that has the case's name.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Launch:
    """What a rank is told.

    Attributes:
        case: what the rank runs, a name that its module interprets.
        folder: a directory that all ranks of the launch can access.
        store: a path without a file, at which the ranks' process group stores its data.
        options: the case's own.
        world: number of ranks.
        rank: this one's.
        timeout: seconds after which the ranks are killed; less than a test's own limit, since the
            server answers no other test while they run.
    """

    case: str
    folder: str
    store: str
    options: Mapping[str, Any]
    world: int = 2
    rank: int = 0
    timeout: float = 240.0

    def join(self) -> None:
        """Make the ranks one process group over gloo."""
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        meet = f"file://{self.store}"
        dist.init_process_group("gloo", init_method=meet, rank=self.rank, world_size=self.world)

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Be in the group for a block; the ranks wait for each other at its end."""
        import torch.distributed as dist

        self.join()
        yield
        dist.barrier()
        dist.destroy_process_group()


class Ranks:
    """A test's connection to a server of ranks; calling it launches a case.

    Attributes:
        said: the stdout and stderr of each rank of the last launch.
    """

    def __init__(self, server: subprocess.Popen[str], folders: Path) -> None:
        self._server = server
        self._folders = folders
        self._count = 0
        self.said: list[str] = []

    def __call__(
        self,
        case: str,
        *,
        folder: Path | None = None,
        world: int = 2,
        dies: bool | signal.Signals | None = False,
        timeout: float = 240.0,
        **options: Any,
    ) -> list[Any]:
        """Run a case in new processes; returns each rank's result.

        Args:
            case: what to run.
            folder: the ranks' directory; ``None`` for a new one.
            world: number of ranks.
            dies: whether a rank is expected to be killed, or the signal that ends it. If so,
                nothing is returned.
            timeout: seconds after which the ranks are killed.
            **options: the case's own options, ready for JSON.
        """
        self._count += 1
        place = folder or self._folders / str(self._count)
        place.mkdir(parents=True, exist_ok=True)
        for rank in range(world):
            _result(place, rank).unlink(missing_ok=True)
        with tempfile.TemporaryDirectory() as store:
            launch = Launch(
                case, str(place), f"{store}/store", options, world=world, timeout=timeout
            )
            assert self._server.stdin is not None
            assert self._server.stdout is not None
            self._server.stdin.write(json.dumps(asdict(launch)) + "\n")
            self._server.stdin.flush()
            codes = json.loads(self._server.stdout.readline())
        # If one rank fails, the others lose their connection; so every rank's log is shown.
        self.said = [_log(place, rank).read_text() for rank in range(world)]
        logs = "\n".join(one[-3000:] for one in self.said)
        if dies:
            by = signal.SIGKILL if dies is True else dies
            assert -by in codes, f"{codes}\n{logs}"
            return []
        assert codes == [0] * world, logs
        return [json.loads(_result(place, rank).read_text()) for rank in range(world)]


@contextlib.contextmanager
def rank_server(module: str, folders: Path, **variables: str) -> Iterator[Ranks]:
    """Start a server for the ranks of a module.

    Args:
        module: dotted name of the module.
        folders: the folder in which each launch gets its own directory.
        **variables: environment variables of the ranks, beside all inherited variables except the
            shim's.
    """
    if not hasattr(os, "fork"):
        import pytest

        pytest.skip("needs os.fork")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PRECISION_SHIM")
    }
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.processes.rank_server", module],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**environment, "OMP_NUM_THREADS": "1", **variables},
    )
    assert server.stdin is not None
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    try:
        yield Ranks(server, folders)
    finally:
        server.stdin.close()
        server.wait(timeout=30)
        server.stdout.close()


def serving(module: str) -> Any:
    """Make a fixture: the connection to a server for the ranks of a module, for a session."""
    import pytest

    @pytest.fixture(scope="session")
    def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
        with rank_server(module, tmp_path_factory.mktemp("ranks")) as server:
            yield server

    return ranks


def run_module(ranks: Ranks, *words: object, cwd: Path = ROOT, **variables: str) -> tuple[int, str]:
    """Run ``python -m WORDS`` in a fork of a server.

    Args:
        ranks: a server whose module has ``module``.
        *words: the module and its arguments.
        cwd: the working directory.
        **variables: beside all inherited variables except the shim's.

    Returns:
        The exit status, and the output on both streams.
    """
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PRECISION_SHIM")}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    (code,) = ranks(
        "module",
        world=1,
        arguments=["-m", *map(str, words)],
        environment={**clean, "PYTHONPATH": path, **variables},
        cwd=str(cwd),
    )
    return code, ranks.said[0]


def look_ahead(framework: str) -> None:
    """Read once, in the server, the records and the adapter that a rank's ``install()`` will read.

    Nothing is patched, and no framework is imported.
    """
    from precision_shim.process.registry import entries
    from precision_shim.process.settings import resolve
    from precision_shim_tools.predicted import predict_status

    predict_status(entries(third_party=False)[framework], resolve(environ={}))


def _result(folder: Path, rank: int) -> Path:
    return folder / f"result-{rank}.json"


def _log(folder: Path, rank: int) -> Path:
    return folder / f"log-{rank}"


# -- the server's end --------------------------------------------------------------------------


def _rank(module: Any, launch: Launch) -> None:
    folder = Path(launch.folder)
    log = os.open(_log(folder, launch.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(
        RANK=str(launch.rank),
        WORLD_SIZE=str(launch.world),
        LOCAL_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )
    program = module.run if hasattr(module, "run") else getattr(module, launch.case)
    found = program(launch)
    _result(folder, launch.rank).write_text(json.dumps(found, default=float))


def _fork(module: Any, launch: Launch) -> list[int]:
    """Fork the ranks of a launch and wait for them; returns their exit statuses."""
    children = []
    for rank in range(launch.world):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                _rank(module, replace(launch, rank=rank))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                for one in multiprocessing.active_children():  # Megatron's, for checkpoints
                    one.terminate()
                os._exit(status)  # gloo's threads may prevent a normal exit
        children.append(child)
    codes: dict[int, int] = {}
    end = time.monotonic() + launch.timeout
    while len(codes) < len(children):
        done, status = os.waitpid(-1, os.WNOHANG)
        if done:
            codes[done] = os.waitstatus_to_exitcode(status)
            if codes[done]:  # the others wait for it
                end = min(end, time.monotonic() + 5)
            continue
        if time.monotonic() > end:
            for child in children:
                if child not in codes:
                    os.kill(child, signal.SIGTERM)
                    os.kill(child, signal.SIGKILL)
            end = math.inf
        time.sleep(0.01)
    return [codes[child] for child in children]


def freeze() -> None:
    """Exclude all existing objects from garbage collection.

    Frameworks collect garbage around each step, and ``install()`` searches the objects. Those of a
    thousand imported modules would take longer than the rest of a test.
    """
    gc.collect()
    gc.freeze()


def _serve(name: str) -> None:
    """Answer launches until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module = importlib.import_module(name)
    module.prepare()
    freeze()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_fork(module, Launch(**json.loads(line)))), file=answers, flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1])
