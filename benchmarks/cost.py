"""Measures what the shim costs a worker that imports its framework, and its commands.

    python benchmarks/cost.py .tox                      # where tox keeps its environments
    python benchmarks/cost.py .tox --old ../a-checkout  # beside another build, in turn
    python benchmarks/cost.py .tox --write              # writes the tables into docs/cost.md

Each figure is a median over the rounds; each round runs all cases in a new random order. Seconds
are processor time, user and system, of the process. ``+`` is the median of the differences from the
same framework without the shim, within a round; the spread is the middle half of the differences
that two runs without the shim have. A checkout needs ``_version.py``, which its build writes.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "cost.md"
IMPORTS = "<!-- measured:imports -->", "<!-- /measured:imports -->"
COMMANDS_OF = "<!-- measured:commands -->", "<!-- /measured:commands -->"
HEAD = "| worker imports | shim | CPU s | + s | MiB | + MiB |\n|---|---|---|---|---|---|"
WORKERS = {
    "verl-0.9.1": (
        "verl.workers.engine.megatron.transformer_impl",
        "verl.workers.engine.fsdp.transformer_impl",
    ),
    "skyrl-0.4.0": ("skyrl.backends.skyrl_train.workers.worker",),
    "nemo-rl-0.7.0": ("nemo_rl.models.policy.workers.dtensor_policy_worker_v2",),
    "torchtitan-0.3.0": ("torchtitan.trainer",),
}
"""Maps a tox environment to the modules that a worker of its framework imports."""

_BUILD = """
import json, sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.for_model(**json.load(open(sys.argv[1] + "/config.json")))
with torch.device("meta"):
    AutoModelForCausalLM.from_config(config)
"""
_DECIDE = """
import sys, precision_shim
from precision_shim.adapting import decide
for number in range(int(sys.argv[1])):
    decide("verl", "actor", "audit", f"choice {number}", "because")
print(precision_shim.status())
"""
_SHIM, _NEWEST = ("-m", "precision_shim"), next(iter(WORKERS))
_PPO = ("--", "python3", "-m", "verl.trainer.main_ppo", "--config-name=ppo_megatron_trainer")
_RANKS, _DECISIONS = "`checkpoint`, moments that are bf16 numbers: {:,}", "{:,} different decisions"
COMMANDS = {
    "`import torch`": (_NEWEST, ("-c", "import torch")),
    "torch, transformers and a 7B model on the meta device": (_NEWEST, ("-c", _BUILD, "{}/7B")),
    "`plan`, 7B on Megatron": (_NEWEST, (*_SHIM, "plan", "--model", "{}/7B", *_PPO)),
    "`plan`, 671B, mixture of experts, verl 0.7.1": (
        "verl-0.7.1",
        (*_SHIM, "plan", "--model", "{}/671B", *_PPO),
    ),
    "`checkpoint nowhere`": (_NEWEST, (*_SHIM, "checkpoint", "nowhere")),
    **{
        _RANKS.format(2 * one): (_NEWEST, (*_SHIM, "checkpoint", f"{{}}/ranks-{one}"))
        for one in (4000, 20000, 60000)
    },
    "`checkpoint`, distributed: 20,000 tensors": (
        _NEWEST,
        (*_SHIM, "checkpoint", "{}/distributed"),
    ),
    "`doctor`": (_NEWEST, (*_SHIM, "doctor")),
    **{_DECISIONS.format(one): (_NEWEST, ("-c", _DECIDE, str(one))) for one in (20000, 60000)},
}
"""Maps a row to its tox environment and its command, in which ``{}`` is the folder of the files."""

LONG = {_RANKS.format(40000), _RANKS.format(120000), _DECISIONS.format(60000)}
"""The rows that another build does not run, which may need minutes for one."""


@dataclass
class Case:
    """A process to run, and the seconds and MiB of its runs."""

    name: str
    command: tuple[str, ...]
    build: Path
    seconds: list[float] = field(default_factory=list)
    mebibytes: list[float] = field(default_factory=list)

    def run(self, python: Path) -> None:
        """Run the process once, and keep its figures."""
        left_out = ("PRECISION_SHIM", "PYTHONDONTWRITEBYTECODE")  # jobs have our bytecode, too
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
        paths = os.pathsep.join(str(self.build / one) for one in ("shim", "adapters", "tools"))
        put = {"PYTHONPATH": paths, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            (str(python), *self.command),
            env={**inherited, **put},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode not in range(4):  # see the help of ``checkpoint``
            raise SystemExit(f"{self.name}: {' '.join(self.command)} ended with {status}")
        self.seconds.append(usage.ru_utime + usage.ru_stime)
        self.mebibytes.append(usage.ru_maxrss / 1024)


def measured(python: Path, cases: list[Case], rounds: int) -> list[Case]:
    for case in cases:  # fills the file cache, and writes bytecode
        case.run(python)
        case.seconds.clear()
        case.mebibytes.clear()
    for _ in range(rounds):
        for case in random.sample(cases, len(cases)):
            case.run(python)
    return cases


def added(values: list[float], base: list[float]) -> list[float]:
    return [one - other for one, other in zip(values, base, strict=True)]


def rows(name: str, cases: list[Case]) -> list[str]:
    """The table's rows of one framework: without the shim twice, and with each build."""
    base, again, *others = cases
    low, _, high = statistics.quantiles(added(again.seconds, base.seconds), n=4)
    seconds, memory = statistics.median(base.seconds), statistics.median(base.mebibytes)
    found = [f"| {name} | without | {seconds:.2f} | {low:+.2f} to {high:+.2f} | {memory:.0f} | |"]
    for case in others:
        more = statistics.median(added(case.seconds, base.seconds))
        wide = statistics.median(added(case.mebibytes, base.mebibytes))
        ratio = f"{more:+.2f} (x {1 + more / seconds:.3f})"
        total, size = statistics.median(case.seconds), statistics.median(case.mebibytes)
        found.append(f"| | {case.name} | {total:.2f} | {ratio} | {size:.0f} | {wide:+.1f} |")
    return found


def summary(table: str) -> str:
    """A sentence on the framework whose import the shim lengthens most, from the table's rows."""
    cells = [[one.strip() for one in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    pairs = zip(cells[::2], cells[1::2], strict=True)  # without the shim, and with this build
    without, ours = max(pairs, key=lambda pair: float(pair[1][3].rstrip(")").split()[-1]))
    low, high = (float(one) for one in without[3].split(" to "))
    seconds = float(ours[3].split()[0])
    place = "more than" if seconds > high else "less than" if seconds < low else "within"
    return (
        f"The import that the shim changes most is {without[0]}'s: {ours[3]} s of {without[2]} s, "
        f"{place} the {without[3]} s that separate runs without the shim."
    )


def with_block(page: str, markers: tuple[str, str], text: str) -> str:
    """A page's text, with ``text`` between the page's two markers."""
    begin, end = markers
    if (page.count(begin), page.count(end)) != (1, 1):
        raise SystemExit(f"{PAGE.name} should have {begin} ... {end} once")
    head, rest = page.split(begin)
    return f"{head}{begin}\n{text}\n{end}{rest.split(end)[1]}"


def imports(asked: argparse.Namespace, builds: dict[str, Path]) -> list[str]:
    """The rows of each framework whose environment is there."""
    found = []
    for name, modules in WORKERS.items():
        python = asked.folder / name / "bin" / "python"
        if asked.only not in (None, name) or not python.exists():
            continue
        code = f"import {', '.join(modules)}"
        on = f"import precision_shim; precision_shim.install(); {code}"
        cases = [Case(one, ("-c", code), ROOT) for one in ("without", "again")]
        cases += [Case(build, ("-c", on), place) for build, place in builds.items()]
        found += rows(name, measured(python, cases, asked.rounds))
        print("\n".join(found[-1 - len(builds) :]), flush=True)
    return found


def commands(asked: argparse.Namespace, builds: dict[str, Path]) -> list[str]:
    """The table of the commands whose environment is there."""
    pythons = {name: asked.folder / name / "bin" / "python" for name, _ in COMMANDS.values()}
    missing = [name for name, python in pythons.items() if not python.exists()]
    if asked.write and missing:
        raise SystemExit(f"{asked.folder} should have {', '.join(missing)}: nothing written")
    found = [f"| command | {' | '.join(builds)} |", f"|---|{'---|' * len(builds)}"]
    with tempfile.TemporaryDirectory() as folder:
        for name, (where, words) in COMMANDS.items():
            if asked.only not in (None, where) or where in missing:
                continue
            command = tuple(word.replace("{}", folder) for word in words)
            if command != words and not os.listdir(folder):
                files = str(ROOT / "benchmarks" / "cost_files.py")
                Case("the files", (files, folder), ROOT).run(pythons[where])
            cases = [Case(build, command, place) for build, place in builds.items()]
            cases = cases[:1] if name in LONG else cases
            measured(pythons[where], cases, asked.rounds)
            cells = [f"{statistics.median(one.seconds):.2f} s" for one in cases]
            cells += [""] * (len(builds) - len(cases))
            found.append(f"| {name} | {' | '.join(cells)} |")
    return found


def main() -> None:
    """Print the tables, or write them into the page, too."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where tox keeps its environments")
    parser.add_argument("--old", type=Path, help="a checkout of another build")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", help="one environment, such as verl-0.9.1")
    parser.add_argument("--write", action="store_true", help="into docs/cost.md")
    asked = parser.parse_args()
    if asked.write and (asked.old or asked.only):
        parser.error("--write is for this build and all environments: leave --old and --only out")
    builds = {"this build": ROOT, **({"the other build": asked.old} if asked.old else {})}
    print(HEAD)
    found = imports(asked, builds)
    of_commands = commands(asked, builds)
    print("\n" + "\n".join(of_commands))
    if not asked.write:
        return
    if len(found) != 2 * len(WORKERS):
        raise SystemExit(f"{asked.folder} should have {', '.join(WORKERS)}: nothing written")
    table = "\n".join([HEAD, *found])
    page = with_block(PAGE.read_text("utf-8"), IMPORTS, f"{table}\n\n{summary(table)}")
    PAGE.write_text(with_block(page, COMMANDS_OF, "\n".join(of_commands)), "utf-8")


if __name__ == "__main__":
    main()
