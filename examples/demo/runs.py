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


def together(world_size: int) -> bool:
    """Whether the machine has enough CPU cores to execute both runs at the same time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (cores or 1) >= 2 * world_size


def train(console: Console, specs: tuple[Spec, Spec], output: Path) -> None:
    """Execute both runs, and show their stages: as moving bars on a terminal, else as lines."""
    from rich import progress as rich_progress

    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(bar_width=None),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TextColumn("{task.fields[doing]}"),
        rich_progress.TimeElapsedColumn(),
    )
    shown = rich_progress.Progress(
        *columns, console=console, expand=True, disable=not console.is_terminal
    )
    with shown as progress:
        for group in [list(specs)] if together(specs[0].world_size) else [[one] for one in specs]:
            runs: dict[TaskID, _Run] = {}
            try:
                for spec in group:
                    label, doing = f"{spec.name} the shim".ljust(16), "imports verl and Megatron"
                    runs[progress.add_task(label, total=None, doing=doing)] = _Run(spec, output)
                    if not console.is_terminal:
                        console.print(f"{label}: {doing}")
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
                    _show(event, run.spec, task, progress)
            if all(ended):
                return
            selector.select(0.2)
            time.sleep(0.05)  # avoids busy waiting: a closed pipe is always readable


def _show(event: dict[str, Any], spec: Spec, task: TaskID, progress: Progress) -> None:
    doing = f"seed {event['seed']}, loss {event['loss']:.3f}"
    progress.update(task, completed=event["step"], total=spec.steps, doing=doing)
    if not progress.console.is_terminal and event["step"] in {1, spec.steps}:
        label = f"{spec.name} the shim".ljust(16)
        progress.console.print(f"{label}: {doing} after step {event['step']} of {spec.steps}")
