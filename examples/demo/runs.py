"""Starts the processes of the demo's two runs, shows their progress, and ends them."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precision_shim.process import settings as _settings
from precision_shim.process.settings import PREFIX

from .worker import Spec

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

_ROOT = Path(__file__).parents[2]


class RunFailedError(Exception):
    """A run ended before it wrote its result."""


class _Run:
    """The processes of one run, and the events that rank 0 sends."""

    def __init__(self, spec: Spec, output: Path) -> None:
        self.spec = spec
        path = Path(spec.result).with_suffix(".spec.json")
        spec.write(path)
        self.reader, writer = os.pipe()
        os.set_blocking(self.reader, False)
        self._buffer = b""
        self.logs = [output / f"{spec.name}.rank{rank}.log" for rank in range(spec.world_size)]
        self.processes: list[subprocess.Popen[bytes]] = []
        worker = (sys.executable, "-m", "examples.demo.worker")
        try:
            for rank, log in enumerate(self.logs):
                with log.open("wb") as file:
                    self.processes.append(
                        subprocess.Popen(
                            [*worker, str(path), str(rank), str(writer)],
                            stdin=subprocess.DEVNULL,
                            stdout=file,
                            stderr=subprocess.STDOUT,
                            env=_environment(spec),
                            pass_fds=(writer,) if rank == 0 else (),
                            cwd=path.parent,
                        )
                    )
        finally:
            os.close(writer)

    def events(self) -> list[dict[str, Any]]:
        """The events that rank 0 has sent since the last call of ``events``."""
        try:
            while chunk := os.read(self.reader, 65536):
                self._buffer += chunk
        except BlockingIOError:
            pass
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines]

    @property
    def done(self) -> bool:
        """Whether every rank has ended with status 0.

        Raises:
            RunFailedError: a rank has ended with another status.
        """
        codes = [process.poll() for process in self.processes]
        for code, log in zip(codes, self.logs, strict=True):
            if code:
                raise RunFailedError(
                    f"the run {self.spec.name} the shim ended with status {code}; the end of "
                    f"{log}:\n{_tail(log)}"
                )
        return None not in codes

    def end(self) -> None:
        """End the processes that still run."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        os.close(self.reader)


def _environment(spec: Spec) -> dict[str, str]:
    environment = dict(os.environ)
    if not spec.shim:
        environment[PREFIX] = "0"
    elif _settings.switch() != "off":  # PRECISION_SHIM=0 in the environment stays
        environment.pop(PREFIX, None)
    # The worker starts in another directory, where it would not find ``examples``.
    path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *([path] if path else [])])
    # The demo's matrices are too small to gain from threads.
    environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def _tail(log: Path, lines: int = 12) -> str:
    text = log.read_text(encoding="utf-8", errors="replace")
    return "\n".join(f"  {line}" for line in text.splitlines()[-lines:])


def train(console: Console, specs: tuple[Spec, Spec], output: Path) -> None:
    """Execute both runs, at the same time if the machine has enough CPU cores."""
    from rich import progress as rich_progress

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    together = (cores or 1) >= 2 * specs[0].world_size
    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(bar_width=None),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TextColumn("{task.fields[loss]}"),
        rich_progress.TimeElapsedColumn(),
    )
    with rich_progress.Progress(*columns, console=console, expand=True) as progress:
        groups = [list(specs)] if together else [[spec] for spec in specs]
        for group in groups:
            runs: dict[TaskID, _Run] = {}
            try:
                for spec in group:
                    label = f"{spec.name} the shim".ljust(16)
                    task = progress.add_task(label, total=spec.steps * len(spec.seeds), loss="")
                    runs[task] = _Run(spec, output)
                _follow(runs, progress)
            finally:
                for run in runs.values():
                    run.end()


def _follow(runs: dict[TaskID, _Run], progress: Progress) -> None:
    """Show the progress of the runs until all have ended."""
    with selectors.DefaultSelector() as selector:
        for run in runs.values():
            selector.register(run.reader, selectors.EVENT_READ)
        while True:
            ended = [run.done for run in runs.values()]
            for task, run in runs.items():
                for event in run.events():
                    if event["event"] == "step":
                        progress.update(task, advance=1, loss=f"loss {event['loss']:.3f}")
            if all(ended):
                return
            selector.select(0.2)
            time.sleep(0.05)  # avoids busy waiting: a closed pipe is always readable
