"""``precision-shim demo``: trains a tiny GPT on this machine, without and with the shim.

``precision_shim_tools.cli.demo`` imports this package from a clone; an installed wheel has no
examples.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precision_shim.errors import SettingsError
from precision_shim.process import settings as _settings
from precision_shim.process.settings import PREFIX, TABLE, Settings
from precision_shim_tools.cli import OPTIONS, settings_of

from . import ending
from .runs import RunFailedError, together, train
from .worker import Spec

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["add_options", "demo"]

_OURS = Path(__file__).with_name("demo.yaml")
_SECONDS, _SEEDS, _STEPS = 60, 3, 150
"""How long both runs may take before a further seed, the most seeds, and the steps of each run."""
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
    """Raised if the demo cannot start; the message names a remedy."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to the parser of its command."""
    from . import rl

    several = _whole(1, 16)
    parser.add_argument(
        "--rl", action="store_true",
        help="GRPO instead, with verl's main_ppo and vLLM; takes --steps, --seeds, --output alone",
    )  # fmt: skip
    parser.add_argument("--nproc", type=several, default=1, help="ranks, over gloo (1)")
    parser.add_argument(
        "--steps", type=_whole(2),
        help=f"optimizer steps of each training ({_STEPS}; with --rl {rl.STEPS})",
    )  # fmt: skip
    parser.add_argument(
        "--seeds",
        type=several,
        help=f"trainings per run (as many as end within a minute, up to {_SEEDS}; with --rl 1)",
    )
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
    """Return a function that parses a whole number within bounds, for argparse."""
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
    """Train without and with the shim; return the exit status, which is 0 if all checks pass."""
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
        job = _Job(
            optim, asked.config, text, output, asked.nproc, asked.steps or _STEPS, asked.seeds
        )
        return 0 if _demo(console, job, given, settings) else 1
    except _CannotRunError as error:
        print(f"precision-shim demo: {error}", file=sys.stderr)
        return 2
    except RunFailedError as error:
        print(f"precision-shim demo: {error}", file=sys.stderr)
        return 1


def _rl(asked: argparse.Namespace) -> int | None:
    """Run the RL demo and return its exit status; ``None`` if this machine cannot run it.

    After ``None`` the caller runs the demo on Megatron instead.
    """
    from . import rl

    if reason := rl.unavailable():
        print(f"precision-shim demo --rl: {reason}. What runs here:", file=sys.stderr)
        return None
    others: dict[str, object] = {"nproc": 1, "beta2": None, "config": None, "text": None, "set": []}
    values = {**vars(asked), "set": asked.settings}
    if given := [f"--{name}" for name, default in others.items() if values[name] != default]:
        allowed = "--steps, --seeds and --output"
        raise _CannotRunError(f"--rl takes {allowed} alone, not {', '.join(given)}")
    from rich.console import Console

    output, steps = asked.output.absolute(), asked.steps or rl.STEPS
    try:
        return 0 if rl.demo(Console(highlight=False), output, steps, asked.seeds or 1) else 1
    except rl.JobFailedError as error:
        raise RunFailedError(str(error)) from error
    except KeyboardInterrupt:
        print("precision-shim demo: interrupted; all that it started has ended", file=sys.stderr)
        return 130


def _shim_settings(texts: list[str]) -> tuple[dict[str, object], Settings]:
    """The settings from ``--set``, and all settings that ``install()`` would use with them."""
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
    """Read verl's ``optim`` section from the file ``config``, or from ``demo.yaml``."""
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
    """The options from the command line."""

    optim: dict[str, Any]
    config: Path | None
    text: Path | None
    output: Path
    nproc: int
    steps: int
    seeds: int | None

    @property
    def beta2(self) -> float:
        """Adam's beta2; Megatron's default if the settings do not give it."""
        return float(self.optim["override_optimizer_config"].get("adam_beta2", 0.999))

    @property
    def ranks(self) -> str:
        """The number of ranks, as text."""
        return f"{self.nproc} rank{'s' if self.nproc > 1 else ''} over gloo"

    def specs(self, scratch: Path, settings: dict[str, object]) -> tuple[Spec, Spec]:
        """The specs of the two runs, without and with the shim."""
        seconds = _SECONDS if together(self.nproc) else _SECONDS / 2
        without, with_shim = (
            Spec(
                name=name,
                shim=name == "with",
                settings=settings if name == "with" else {},
                optim=self.optim,
                text=None if self.text is None else str(self.text.absolute()),
                seeds=tuple(range(self.seeds or _SEEDS)),
                seconds=seconds if self.seeds is None else math.inf,
                steps=self.steps,
                world_size=self.nproc,
                global_batch=-(-8 // self.nproc) * self.nproc,
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
    """Run both trainings and print a report; return whether all checks pass."""
    from . import report

    started = time.monotonic()
    versions = {name: importlib.metadata.version(name) for name in ("verl", "megatron-core")}
    versions |= {"torch": importlib.metadata.version("torch"), "Python": platform.python_version()}
    seeds = f"as many seeds as a minute allows, up to {_SEEDS}"
    if job.seeds is not None:
        seeds = f"{job.seeds} seed{'s' if job.seeds > 1 else ''}"
    console.print(f"[bold]precision_shim demo[/]: a tiny GPT on a CPU, {job.ranks}")
    for label, value in (
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("settings", f"{job.config or 'examples/demo/demo.yaml'}, beta2 {job.beta2:g}"),
        ("text", f"{job.text or 'the help texts in every Python (pydoc_data.topics)'}, by bytes"),
        ("training", f"{job.steps} steps, {seeds}"),
    ):
        ending.indented(console, f"{label:<9} {value}")
    if _settings.switch() == "off":
        ending.indented(
            console,
            f"{PREFIX}={os.environ[PREFIX]} is set: install() does nothing, so that the run with "
            "the shim trains without it, too. Unset it to see the shim's effect.",
        )
    settings = _install_settings(console, versions["verl"], given, in_force)
    with tempfile.TemporaryDirectory(prefix="precision-shim-demo-") as scratch:
        specs = job.specs(Path(scratch), settings)
        train(console, specs, job.output)
        without, with_shim = (
            json.loads(Path(spec.result).read_text(encoding="utf-8")) for spec in specs
        )
    both = min(len(without["runs"]), len(with_shim["runs"]))
    without["runs"], with_shim["runs"] = without["runs"][:both], with_shim["runs"][:both]
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

    ending.say_what_differs(console, job.optim, without, versions["verl"])
    ending.say_in_force(console, job.nproc, without, with_shim)
    ending.say_losses(console, without, with_shim, allowed)
    ending.say_checks(console, with_shim, checks)
    console.print(f"\n{seconds:.0f} s. curves.png, result.json and the logs are in")
    console.print(str(job.output), soft_wrap=True)
    if not ok:
        wrong = "; ".join(f"{each.name}: {each.found}" for each in checks if not each.ok)
        print(f"precision-shim demo: not what was promised: {wrong}", file=sys.stderr)
    return ok


def _install_settings(
    console: Console, verl: str, given: dict[str, object], in_force: Settings
) -> dict[str, object]:
    """The settings that the run with the shim passes to ``install()``."""
    from packaging.version import Version

    if Version(verl) < Version("0.9.0.dev0") or in_force.is_set("optimizer_states"):
        return given
    console.print(
        f"verl {verl} has an opt-in of its own, at which the shim takes it by default; here it "
        "is told optimizer_states=follow-model."
    )
    return {**given, "optimizer_states": "follow-model"}
