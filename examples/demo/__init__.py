"""``precision-shim demo``: a real, small training on this machine, without and with the shim.

Run from a clone: ``precision_shim.cli.demo`` finds it there.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precision_shim.cli import OPTIONS, settings_of
from precision_shim.errors import SettingsError
from precision_shim.process import settings as _settings
from precision_shim.process.settings import PREFIX, TABLE, Settings

from .worker import Spec, precision_keys

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from .report import Check, Tolerance

__all__ = ["add_options", "demo"]

_ROOT = Path(__file__).parents[2]
_OURS = Path(__file__).with_name("demo.yaml")
_SECTION = {"optimizer": "adam", "min_lr": 0.0, "clip_grad": 1.0, "weight_decay": 0.01}
_EXTRA = {"rich": "rich", "matplotlib": "matplotlib", "yaml": "pyyaml", "numpy": "numpy"}
_NEEDED = {
    **_EXTRA,
    "torch": "torch",
    "verl": "verl",
    "megatron.core": "megatron-core",
    "omegaconf": "omegaconf",
}


class _CannotRunError(Exception):
    """The demo cannot start; the message says what to do."""


class _RunFailedError(Exception):
    """A run ended before its result."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to its command."""
    several = _whole(1, 16)
    parser.add_argument(
        "--rl", action="store_true",
        help="GRPO instead, with verl's main_ppo, Ray and vLLM; takes --steps and --output alone",
    )  # fmt: skip
    parser.add_argument("--nproc", type=several, default=1, help="ranks, over gloo (1)")
    parser.add_argument(
        "--steps", type=_whole(2), help="optimizer steps of each training (300; with --rl 28)"
    )
    parser.add_argument("--seeds", type=several, default=3, help="trainings per run (3)")
    parser.add_argument("--beta2", type=float, help="Adam's beta2, instead of the settings file's")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("precision-shim-demo"),
        metavar="FOLDER",
        help="for curves.png, result.json and the logs (precision-shim-demo)",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML with verl's optim section, not ours"
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="to train on, not Python's own help texts"
    )
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"a setting of the shim, one of {', '.join(TABLE)}; may be repeated",
    )


def _whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """A reader of whole numbers within bounds, for argparse."""
    bounds = f"a whole number >= {low}" + ("" if high is None else f" and <= {high}")

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if number < low or (high is not None and number > high):
            raise argparse.ArgumentTypeError(f"{text!r}; allowed: {bounds}")
        return number

    return read


def demo(asked: argparse.Namespace) -> int:
    """Run the trainings, compare, and say whether the effect is what was promised."""
    try:
        if asked.rl and (done := _rl(asked)) is not None:
            return done
        _check_needed()
        given, settings = _shim_settings(asked.settings)
        optim = _optim(asked.config, asked.beta2)
        text: Path | None = asked.text
        if text is not None and not text.is_file():
            raise _CannotRunError(f"--text {text}: no such file")
        output: Path = asked.output.absolute()
        output.mkdir(parents=True, exist_ok=True)
        from rich.console import Console

        console = Console(highlight=False)
        job = _Job(optim, asked.config, text, output, asked.nproc, asked.steps or 300, asked.seeds)
        return 0 if _demo(console, job, given, settings) else 1
    except _CannotRunError as error:
        print(f"precision-shim demo: {error}", file=sys.stderr)
        return 2
    except _RunFailedError as error:
        print(f"precision-shim demo: {error}", file=sys.stderr)
        return 1


def _rl(asked: argparse.Namespace) -> int | None:
    """The demo of RL; None where it cannot run here, and the other one does instead."""
    from . import rl

    if reason := rl.unavailable():
        print(f"precision-shim demo --rl: {reason}. What runs here:", file=sys.stderr)
        return None
    others: dict[str, object] = {
        "nproc": 1,
        "seeds": 3,
        "beta2": None,
        "config": None,
        "text": None,
        "set": [],
    }
    values = {**vars(asked), "set": asked.settings}
    if given := [f"--{name}" for name, default in others.items() if values[name] != default]:
        raise _CannotRunError(f"--rl takes --steps and --output alone, not {', '.join(given)}")
    from rich.console import Console

    output: Path = asked.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    try:
        return 0 if rl.demo(Console(highlight=False), output, asked.steps or rl.STEPS) else 1
    except rl.JobFailedError as error:
        raise _RunFailedError(str(error)) from error
    except KeyboardInterrupt:
        print("precision-shim demo: interrupted; all that it started has ended", file=sys.stderr)
        return 130


def _shim_settings(texts: list[str]) -> tuple[dict[str, object], Settings]:
    """What ``--set`` gives to ``install()``, and the settings that then are in force."""
    try:
        _settings.switch()
        given = settings_of(texts)
        return given, _settings.resolve(settings=given, where=OPTIONS)
    except SettingsError as error:
        raise _CannotRunError(str(error)) from None


def _check_needed() -> None:
    missing = []
    for module, package in _NEEDED.items():
        try:
            found = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            missing.append(package)
    if missing and set(missing) <= set(_EXTRA.values()):
        raise _CannotRunError(
            f"not installed here: {', '.join(missing)}: pip install 'precision-shim[demo]'"
        )
    if missing:
        raise _CannotRunError(
            f"not installed here: {', '.join(missing)}. It trains through the real ones: "
            "`tox run -e demo` in a clone of the repository, or `pip install "
            "'precision-shim[demo]' verl==0.7.1 megatron-core==0.16.1 'pyarrow<21'` in a new "
            "environment."
        )


def _optim(config: Path | None, beta2: float | None) -> dict[str, Any]:
    """The optim section, read as verl reads its configuration."""
    path = config or _OURS
    try:
        OmegaConf = importlib.import_module("omegaconf").OmegaConf  # noqa: N806
        loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except Exception as error:
        raise _CannotRunError(f"cannot read {path}: {error}") from error
    if not isinstance(loaded, dict) or "lr" not in loaded:
        raise _CannotRunError(
            f"{path} is no optim section of verl: a mapping with at least lr was expected"
        )
    optim: dict[str, Any] = {**_SECTION, **{str(key): value for key, value in loaded.items()}}
    optim["override_optimizer_config"] = dict(optim.get("override_optimizer_config") or {})
    if beta2 is not None:
        if not 0 < beta2 < 1:
            raise _CannotRunError(f"--beta2 {beta2}: a number between 0 and 1 was expected")
        optim["override_optimizer_config"]["adam_beta2"] = beta2
    return optim


@dataclass(frozen=True)
class _Job:
    """What was asked on the command line."""

    optim: dict[str, Any]
    config: Path | None
    text: Path | None
    output: Path
    nproc: int
    steps: int
    seeds: int

    @property
    def beta2(self) -> float:
        """Adam's beta2; Megatron's default where the settings do not say."""
        return float(self.optim["override_optimizer_config"].get("adam_beta2", 0.999))

    @property
    def ranks(self) -> str:
        """The number of ranks, in words."""
        return f"{self.nproc} rank{'s' if self.nproc > 1 else ''} over gloo"

    def specs(self, scratch: Path, settings: dict[str, object]) -> tuple[Spec, Spec]:
        """The two runs."""
        without, with_shim = (
            Spec(
                name=name,
                shim=name == "with",
                settings=settings if name == "with" else {},
                optim=self.optim,
                text=None if self.text is None else str(self.text.absolute()),
                seeds=tuple(range(self.seeds)),
                steps=self.steps,
                world_size=self.nproc,
                global_batch=-(-16 // self.nproc) * self.nproc,
                sequence=64,
                hidden_size=64,
                num_layers=2,
                rendezvous=str(scratch / f"{name}.rendezvous"),
                result=str(scratch / f"{name}.json"),
            )
            for name in ("without", "with")
        )
        return without, with_shim


def _demo(console: Console, job: _Job, given: dict[str, object], in_force: Settings) -> bool:
    """Run both trainings and report; return whether the effect is what was promised."""
    from . import report

    started = time.monotonic()
    versions = {name: importlib.metadata.version(name) for name in ("verl", "megatron-core")}
    versions |= {"torch": importlib.metadata.version("torch"), "Python": platform.python_version()}
    plural = "s" if job.seeds > 1 else ""
    console.print(f"[bold]precision_shim demo[/]: a tiny GPT on a CPU, {job.ranks}")
    for label, value in (
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("settings", f"{job.config or 'examples/demo/demo.yaml'}, beta2 {job.beta2:g}"),
        ("text", f"{job.text or 'the help texts in every Python (pydoc_data.topics)'}, by bytes"),
        ("training", f"{job.steps} steps, {job.seeds} seed{plural}"),
    ):
        _indented(console, f"{label:<9} {value}")
    if _settings.switch() == "off":
        _indented(
            console,
            f"{PREFIX}={os.environ[PREFIX]} is set: install() does nothing, so that the run with "
            "the shim trains without it, too. Unset it to see the shim's effect.",
        )
    settings = _install_settings(console, versions["verl"], given, in_force)
    with tempfile.TemporaryDirectory(prefix="precision-shim-demo-") as scratch:
        specs = job.specs(Path(scratch), settings)
        _train(console, specs, job.output)
        without, with_shim = (
            json.loads(Path(spec.result).read_text(encoding="utf-8")) for spec in specs
        )

    allowed = report.tolerance(without)
    checks = report.check(without, with_shim, allowed)
    ok = all(each.ok for each in checks)
    report.draw(
        job.output / "curves.png",
        without,
        with_shim,
        f"A tiny GPT through verl {versions['verl']} and megatron-core "
        f"{versions['megatron-core']} on a CPU, {job.ranks}, beta2 {job.beta2:g}",
    )
    seconds = time.monotonic() - started
    whole = {
        "ok": ok,
        "versions": versions,
        "nproc": job.nproc,
        "steps": job.steps,
        "seconds": round(seconds, 1),
        "optim": job.optim,
        "checks": [vars(each) for each in checks],
        "tolerance": {**vars(allowed), "source": allowed.source},
        "without": without,
        "with": with_shim,
    }
    (job.output / "result.json").write_text(json.dumps(whole, indent=1), encoding="utf-8")

    _say_what_differs(console, job, without, versions["verl"])
    _say_in_force(console, job, without, with_shim)
    _say_losses(console, without, with_shim, allowed)
    _say_checks(console, with_shim, checks)
    console.print(f"\n{seconds:.0f} s. curves.png, result.json and the logs are in")
    console.print(str(job.output), soft_wrap=True)
    if not ok:
        wrong = "; ".join(f"{each.name}: {each.found}" for each in checks if not each.ok)
        print(f"precision-shim demo: not what was promised: {wrong}", file=sys.stderr)
    return ok


def _install_settings(
    console: Console, verl: str, given: dict[str, object], in_force: Settings
) -> dict[str, object]:
    """What the run with the shim gives to ``install()``."""
    from packaging.version import Version

    if Version(verl) < Version("0.9.0.dev0") or in_force.is_set("optimizer_states"):
        return given
    console.print(
        f"verl {verl} has an opt-in of its own, at which the shim takes it by default; here it "
        "is told optimizer_states=follow-model."
    )
    return {**given, "optimizer_states": "follow-model"}


# -- the runs -------------------------------------------------------------------------------


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
        """The events that rank 0 has sent since the last call."""
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
            _RunFailedError: a rank has ended with another status.
        """
        codes = [process.poll() for process in self.processes]
        for code, log in zip(codes, self.logs, strict=True):
            if code:
                raise _RunFailedError(
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
    elif _settings.switch() != "off":  # the kill switch stays in force
        environment.pop(PREFIX, None)
    # The worker starts in another directory, where it would not find ``examples``.
    path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *([path] if path else [])])
    # Matrices this small gain nothing from threads.
    environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def _tail(log: Path, lines: int = 12) -> str:
    text = log.read_text(encoding="utf-8", errors="replace")
    return "\n".join(f"  {line}" for line in text.splitlines()[-lines:])


def _train(console: Console, specs: tuple[Spec, Spec], output: Path) -> None:
    """Do both runs, at the same time where there are processors for both."""
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
            time.sleep(0.05)  # a closed pipe is always readable: no busy waiting


# -- what is said ---------------------------------------------------------------------------


def _say_what_differs(console: Console, job: _Job, without: dict[str, Any], verl: str) -> None:
    adam = without["transformer_engine"]
    if adam["checked_by"] == "stand-in":
        console.print(
            f"\nFusedAdam is the pure-torch stand-in for TransformerEngine {adam['version']}, in "
            "both runs: TransformerEngine is not installed here."
        )
    else:
        console.print(
            f"\nFusedAdam's arguments are judged by the installed TransformerEngine "
            f"{adam['version']}; its steps are the pure-torch stand-in's, in both runs: the real "
            "ones need a GPU."
        )
    left_out = precision_keys(job.optim)
    if not left_out:
        return
    if without["as_written"] is None:
        console.print(f"verl {verl} takes the settings as they are written.")
    else:
        console.print(f"Without the shim verl {verl} ends with these settings, as written, in")
        _indented(console, without["as_written"], "yellow")
    console.print(
        f"So the run without the shim is verl as it runs today: the same settings less "
        f"{', '.join(left_out)}."
    )


def _say_in_force(
    console: Console, job: _Job, without: dict[str, Any], with_shim: dict[str, Any]
) -> None:
    from rich import box
    from rich.table import Table

    from . import report

    def mega(result: dict[str, Any]) -> str:
        return f"{result['runs'][0]['ranks'][0]['total'] / 1e6:.2f} MB"

    rank = without["runs"][0]["ranks"][0]
    title = f"In force in the live objects; {rank['trainable']:,} bf16 parameters"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("")
    for name in ("without", "with the shim"):
        table.add_column(name)
        table.add_column("B/param", justify="right")
    rows = list(zip(report.in_force(without), report.in_force(with_shim), strict=True))
    for before, after in rows[:-1]:
        style = None if before[1:] == after[1:] else "green"
        table.add_row(*before, *after[1:], style=style)
    table.add_section()
    before, after = rows[-1]
    table.add_row(*before, *after[1:], style="bold")
    held = "held by rank 0" + (f" of {job.nproc}" if job.nproc > 1 else "")
    table.add_row(held, "", mega(without), "", mega(with_shim))
    console.print()
    console.print(table)


def _say_losses(
    console: Console, without: dict[str, Any], with_shim: dict[str, Any], allowed: Tolerance
) -> None:
    from rich import box
    from rich.table import Table

    from . import report

    first = [result["runs"][0]["losses"] for result in (without, with_shim)]
    low, high = min(map(min, first)), max(map(max, first))
    console.print("\n[bold]Training loss[/], seed 0, nats per byte")
    for label, losses in zip(("without", "with   "), first, strict=True):
        line = report.sparkline(losses, 52, low, high)
        console.print(f"{label} {losses[0]:.2f} {line} {losses[-1]:.2f}")
    table = Table(
        title="Final loss, on text held out", title_justify="left", title_style="bold",
        box=box.SIMPLE_HEAD,
    )  # fmt: skip
    for name in ("seed", "without", "with the shim", "difference"):
        table.add_column(name, justify="right")
    apart = report.differences(without, with_shim)
    for before, after, each in zip(without["runs"], with_shim["runs"], apart, strict=True):
        numbers = f"{before['held_out']:.4f}", f"{after['held_out']:.4f}", f"{each:+.4f}"
        table.add_row(str(before["seed"]), *numbers)
    console.print()
    console.print(table)
    console.print(f"Tolerance {allowed.value:.4f}: {allowed.source}.")


def _say_checks(console: Console, with_shim: dict[str, Any], checks: list[Check]) -> None:
    decisions = {
        f"{each['feature']}: {each['chosen']} ({each['because']})": None
        for each in with_shim["shim"]["decisions"]
    }
    if decisions:
        console.print("\n[bold]What the shim decided[/]")
        for line in decisions:
            _indented(console, line)
    console.print("\n[bold]Promised and measured[/]")
    for each in checks:
        mark, style = ("ok", None) if each.ok else ("FAIL", "bold red")
        _indented(console, f"{mark}  {each.name}: {each.found}", style)


def _indented(console: Console, line: str, style: str | None = None) -> None:
    from rich.padding import Padding
    from rich.text import Text

    console.print(Padding(Text(line, style or ""), (0, 0, 0, 2), expand=False))
