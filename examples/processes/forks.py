"""Forks that behave like newly started Python processes, but skip the imports that take longest.

The parent process has imported only packages that belong to no framework. A fork receives an
environment, a folder and arguments, and repeats the start of Python with these. The fork therefore
runs the code that demos and tests examine: the shim's start-up file, a framework, a Ray worker.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import shutil
import signal
import site
import socket
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

__all__ = ["begin", "execute", "ray_workers"]

_ROOT = Path(__file__).parents[2]
_START_UP_FILE = "zz_precision_shim.pth"

_CLIENT = """
import json, os, socket, sys
one = socket.socket(socket.AF_UNIX)
one.connect(sys.argv[1])
socket.send_fds(one, [b"."], [1, 2])
told = {"arguments": sys.argv[2:], "environment": dict(os.environ), "cwd": os.getcwd()}
one.sendall(json.dumps(told).encode())
one.shutdown(socket.SHUT_WR)
one.recv(1)  # ends with the worker
"""


def begin(environment: Mapping[str, str], cwd: str) -> None:
    """Repeat the start of Python in this fork, with another environment.

    The function reads ``PYTHONPATH``, executes the shim's start-up file, and imports
    ``sitecustomize``. The process must not have imported the shim.

    Args:
        environment: replaces this process's environment.
        cwd: the working directory to change to.
    """
    assert "precision_shim" not in sys.modules, "the shim is to start here, not before the fork"
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    own = [one for one in sys.path if one not in (*before, "", str(_ROOT))]
    given = [one for one in environment.get("PYTHONPATH", "").split(os.pathsep) if one]
    sys.path[:] = [*dict.fromkeys(given), *own]
    importlib.invalidate_caches()
    for name in [one for one in sys.modules if one.partition(".")[0] in ("examples", "tests")]:
        del sys.modules[name]  # another project may have packages with these names
    place = next((one for one in own if Path(one, _START_UP_FILE).is_file()), None)
    if place is not None:
        site.addpackage(place, _START_UP_FILE, None)
    else:  # a source tree has no start-up file: call the file's function
        importlib.import_module("precision_shim.process.startup").init()
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")


def execute(arguments: Sequence[str]) -> None:
    """Run ``python SCRIPT ARGUMENT ...`` or ``python -m MODULE ARGUMENT ...``."""
    import runpy

    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(arguments)
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    runpy.run_path(arguments[0], run_name="__main__")


@contextlib.contextmanager
def ray_workers() -> Iterator[str]:
    """Yield a command that starts a Ray worker as a fork of this process in its present state.

    Use the command as ``py_executable`` of Ray's runtime environment. This process, which forks,
    must have only one thread.
    """
    folder = Path(tempfile.mkdtemp(prefix="forks", dir="/tmp"))  # a socket's path must be short
    (folder / "bin").mkdir()
    (folder / "client.py").write_text(_CLIENT)
    command = folder / "bin" / "python"
    command.write_text(
        f"#!/bin/sh\nexec '{sys.executable}' -IS '{folder}/client.py' '{folder}/socket' \"$@\"\n"
    )
    command.chmod(0o755)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder}/socket")
    listener.listen()
    ends, mine = os.pipe()
    gc.freeze()  # garbage collection would copy memory that the forks share
    server = os.fork()
    if server == 0:
        os.close(mine)
        try:
            _serve(listener, ends)
        finally:
            os._exit(0)
    os.close(ends)
    listener.close()
    try:
        yield str(command)
    finally:
        os.close(mine)
        with contextlib.suppress(ChildProcessError):  # another call may have waited for the server
            os.waitpid(server, 0)
        shutil.rmtree(folder, ignore_errors=True)


def _serve(listener: socket.socket, ends: int) -> None:
    """Fork a worker for each client that connects, until the driver has ended."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_DFL)
    workers: set[int] = set()
    while True:
        ready, _, _ = select.select([listener.fileno(), ends], [], [], 0.2)
        while workers:
            ended, _ = os.waitpid(-1, os.WNOHANG)
            if not ended:
                break
            workers.discard(ended)
        if ends in ready:
            for one in workers:
                os.kill(one, signal.SIGKILL)
            for one in workers:
                os.waitpid(one, 0)
            return
        if listener.fileno() in ready:
            connection, _ = listener.accept()
            child = os.fork()
            if child == 0:
                listener.close()
                os.close(ends)
                _worker(connection)
            workers.add(child)
            connection.close()


def _worker(connection: socket.socket) -> None:
    """Run one worker in this fork; the connection stays open until the worker ends."""
    status = 1
    try:
        _, (out, err), _, _ = socket.recv_fds(connection, 1, 2)
        os.dup2(out, 1)
        os.dup2(err, 2)
        told = json.loads(b"".join(iter(lambda: connection.recv(1 << 16), b"")))
        begin(told["environment"], told["cwd"])
        execute(told["arguments"])
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
