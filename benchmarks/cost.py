"""Measures what the shim costs a worker's import, step, save and weight sync, and its commands.

    python benchmarks/cost.py .tox                      # where tox keeps its environments
    python benchmarks/cost.py .tox --old ../a-checkout  # beside another build, in turn
    python benchmarks/cost.py .tox --write              # writes the tables into docs/cost.md
    python benchmarks/cost.py .tox --part training      # one table

Each figure is a median over the rounds; each round runs all cases in a new random order. Seconds
are processor time, user and system, of the process. ``+`` is the median of the differences from the
same framework without the shim, within a round; the spread is the middle half of the differences
that two runs without the shim have. ``trainings.py`` measures the steps, saves and syncs, beside
the mean of two runs without the shim; there ± is the median of the two runs' differences. A
checkout needs ``_version.py``, which its build writes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
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


def environment(build: Path) -> dict[str, str]:
    """The environment of a process with a build, where nothing has turned the shim on."""
    left_out = ("PRECISION_SHIM", "PYTHONDONTWRITEBYTECODE")  # jobs have our bytecode, too
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
    paths = os.pathsep.join(str(build / one) for one in ("shim", "adapters", "tools"))
    put = {"PYTHONPATH": paths, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    return {**inherited, **put}


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
        with subprocess.Popen(
            (str(python), *self.command),
            env=environment(self.build),
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


# -- steps, saves and weight syncs -------------------------------------------------------------

TRAINED = "<!-- measured:training -->", "<!-- /measured:training -->"
TRAININGS = {
    "verl FSDP": "verl-0.9.1",
    "verl Megatron": "verl-0.9.1",
    "SkyRL FSDP": "skyrl-0.4.0",
    "NeMo-RL DTensor": "nemo-rl-0.7.0",
    "torchtitan": "torchtitan-0.3.0",
}
"""Maps what ``trainings.py`` trains to its tox environment."""

ROWS = {
    "step in bf16": ("step", "bf16", "bf16, shim"),
    "step in bf16, `PRECISION_SHIM_WATCH_UPDATES=1`": ("step", "bf16", "bf16, watched"),
    "step in fp16": ("step", "fp16", "fp16, shim"),
    "save in fp16": ("save", "fp16", "fp16, shim"),
    "load in fp16": ("load", "fp16", "fp16, shim"),
    "weight sync": ("sync", "bf16", "bf16, shim"),
    "audited weight sync, `PRECISION_SHIM_AUDIT_DIR`": ("sync", "bf16", "bf16, audited"),
}
"""Maps a row to the act, and the processes without and with the shim, of ``trainings.py``."""

AUDIT = "a call of `audit()`"

Figures = dict[str, dict[str, list[float]]]
"""Milliseconds of each round, by act and process."""


def cell(without: list[float], again: list[float], ours: list[float]) -> str:
    """Milliseconds without the shim, what the shim adds, in bold above the spread, the spread."""
    both = [(one + other) / 2 for one, other in zip(without, again, strict=True)]
    spread = statistics.median(map(abs, added(again, without)))
    more = statistics.median(added(ours, both))
    mark = "**" if more > spread else ""
    return f"{statistics.median(without + again):.1f} {mark}{more:+.2f}{mark} (± {spread:.2f})"


def training_table(found: dict[str, Figures]) -> str:
    """A row for each act, and a column for each training."""
    lines = [f"| ms | {' | '.join(found)} |", f"|---|{'---|' * len(found)}"]
    for name, (act, without, ours) in ROWS.items():
        cells = [
            cell(one[act][without], one[act][f"{without}, again"], one[act][ours])
            for one in found.values()
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    calls = [f"{statistics.median(one['audit']['bf16, shim']):.1f}" for one in found.values()]
    return "\n".join([*lines, f"| {AUDIT} | {' | '.join(calls)} |"])


def training_summary(table: str) -> str:
    """Sentences on the differences of the steps, and a count of the others, from the table."""
    head, _, *lines = [[one.strip() for one in row.split("|")[1:-1]] for row in table.splitlines()]
    said = [
        "± is the median difference of two runs without the shim, and a bold figure is above it."
    ]
    others = []
    for name, *cells in lines:
        if name == AUDIT:
            continue
        above = {one: each for one, each in zip(head[1:], cells, strict=True) if "**" in each}
        if name not in ("step in bf16", "step in fp16"):
            others += [each in above.values() for each in cells]
        elif not above:
            said.append(f"On a {name} the shim adds no more than that.")
        else:
            places = [
                f"{one} ({more} of {whole} ms)"
                for one, each in above.items()
                for whole, more in re.findall(r"([\d.]+) \*\*(\S+)\*\*", each)
            ]
            rest = "; on the others it does not" if len(above) < len(cells) else ""
            said.append(f"On a {name} the shim adds more than that on {', '.join(places)}{rest}.")
    return f"{' '.join(said)} Of the other {len(others)} differences, {sum(others)} are above it."


def trainings(asked: argparse.Namespace) -> dict[str, Figures]:
    """The figures of each training whose environment is there."""
    found = {}
    for kind, name in TRAININGS.items():
        python = asked.folder.absolute() / name / "bin" / "python"
        if asked.only not in (None, name) or not python.exists():
            continue
        variables = {**environment(ROOT), "HF_HUB_OFFLINE": "1"}
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [str(python), "-m", "benchmarks.trainings", kind, str(asked.rounds), folder],
                cwd=ROOT,
                env=variables,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise SystemExit(f"{kind}: {done.stdout[-3000:]}\n{done.stderr[-3000:]}")
            found[kind] = json.loads(Path(folder, "figures.json").read_text("utf-8"))
        print(f"\n{training_table({kind: found[kind]})}", flush=True)
    return found


def main() -> None:
    """Print the tables, or write them into the page, too."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where tox keeps its environments")
    parser.add_argument("--old", type=Path, help="a checkout of another build")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", help="one environment, such as verl-0.9.1")
    parser.add_argument("--part", choices=("imports", "commands", "training"), help="one table")
    parser.add_argument("--write", action="store_true", help="into docs/cost.md")
    asked = parser.parse_args()
    if asked.write and (asked.old or asked.only):
        parser.error("--write is for this build and all environments: leave --old and --only out")
    missing = [one for one in WORKERS if not (asked.folder / one / "bin" / "python").exists()]
    if asked.write and missing:
        parser.error(f"{asked.folder} should have {', '.join(missing)}: nothing written")
    builds = {"this build": ROOT, **({"the other build": asked.old} if asked.old else {})}
    page = PAGE.read_text("utf-8")
    if asked.part in (None, "imports"):
        print(HEAD)
        table = "\n".join([HEAD, *imports(asked, builds)])
        if asked.write:
            page = with_block(page, IMPORTS, f"{table}\n\n{summary(table)}")
    if asked.part in (None, "commands"):
        table = "\n".join(commands(asked, builds))
        print(f"\n{table}")
        page = with_block(page, COMMANDS_OF, table)
    if asked.part in (None, "training"):
        table = training_table(trainings(asked))
        page = with_block(page, TRAINED, f"{table}\n\n{training_summary(table)}")
    if asked.write:
        PAGE.write_text(page, "utf-8")


if __name__ == "__main__":
    main()
