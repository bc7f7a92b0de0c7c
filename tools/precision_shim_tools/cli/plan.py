"""``precision-shim plan -- COMMAND``: show a job's memory per GPU and illegal config values."""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

from precision_shim._about import __version__
from precision_shim.adapting import versioned
from precision_shim.errors import PlanError, PrecisionShimError
from precision_shim.process import registry as _registry
from precision_shim.process import settings as _settings
from precision_shim.process import standby
from precision_shim.process.versions import version_of

from ..plan import plot, text
from ..plan.command import Job, Options, read_launch_line
from ..plan.launching import read_launch, unfold
from ..plan.request import Request, Rules, make
from ..plan.search import render, search
from . import build_parser
from . import run as _run
from ._output import Progress, show, write

HELP = "Say what a job's config costs per GPU and whether it is legal, without running it."
MORE = (
    "COMMAND is the line that starts the job; it is not run. Exit status 0: legal; 1: something is "
    "illegal; 2: it cannot be read. Example: precision-shim plan --gpu-memory 80 -- python -m "
    "verl.trainer.main_ppo ..."
)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.usage = "precision-shim plan [options] [--] COMMAND ..."
    parser.add_argument(
        "--model", metavar="DIR", help="the directory of config.json, of all its models"
    )
    parser.add_argument(
        "--parameters",
        metavar="N[,experts=M]",
        help="the models' size, such as 7.6B or 30.5B,experts=29B, where no directory is here",
    )
    parser.add_argument(
        "--transformer-engine",
        metavar="V",
        type=_version,
        help="the version whose rules to apply: the installed one, else the newest known",
    )
    parser.add_argument(
        "--megatron-core", metavar="V", type=_version, help="the same for megatron-core"
    )
    parser.add_argument(
        "--gpu-memory", metavar="GB", type=_memory, help="the memory of a GPU, in GB of 2^30 bytes"
    )
    parser.add_argument(
        "--search", action="store_true", help="find the precision settings that fit --gpu-memory"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of text")
    parser.add_argument("--plot", metavar="FILE", help="write stacked bars as .svg or .png")
    parser.add_argument("job", nargs=argparse.REMAINDER, metavar="COMMAND", help="the launch line")


def _version(word: str) -> str:
    if not word[:1].isdigit():
        raise argparse.ArgumentTypeError(f"{word!r}: expected a version such as 2.14")
    return word


def _memory(word: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *(?:G|GB|GiB)?", word.strip(), re.IGNORECASE)
    if found is None or not float(found[1]):
        raise argparse.ArgumentTypeError(
            f"{word!r}: expected the GB (of 2^30 bytes) of one GPU, such as 80, 80GB or 80GiB"
        )
    return float(found[1])


def run(asked: argparse.Namespace) -> int:
    """Plan the job, print the plan, and return the exit status."""
    words = _run.job_of(asked)
    if not words:
        asked.parser.error("COMMAND is missing: which job is to be planned?")
    if asked.search and asked.gpu_memory is None:
        asked.parser.error("--search needs --gpu-memory")
    standby.stop()  # imports of frameworks must not install the shim in this process
    try:
        # At import some frameworks log to standard output, which may contain only the plan.
        with redirect_stdout(sys.stderr):
            job, request, rules = _read(asked, _without_run(unfold(words)))
        return _show(asked, job, request, rules)
    except (PrecisionShimError, OSError):
        raise
    except Exception as error:
        traceback.print_exc()
        raise PlanError(
            "the plan itself failed, which says nothing of the config. Report this line, the lines "
            f"above it and the command (precision-shim {__version__})."
        ) from error


def _without_run(words: list[str]) -> list[str]:
    """Replace ``precision-shim run`` in a launch line by the variables that it sets for the job."""
    names = ("precision-shim", "precision_shim")
    pairs = enumerate(pairwise(words))
    runs = [at for at, (word, after) in pairs if after == "run" and Path(word).name in names]
    if not runs:
        return words
    front, options = words[: runs[0]], words[runs[0] + 1 :]
    if front[-1:] == ["-m"]:  # python -m precision_shim run
        front = front[:-2]
    given = build_parser(["run"]).parse_args(options)
    command = _run.job_of(given)
    if _settings.switch(read_launch(front).driver) == "off":  # off, so ``run`` sets no variables
        return [*front, *command]
    ours = (f"{name}={value}" for name, value in _run.variables(given).items())
    return [*front, *ours, *command]


def _read(asked: argparse.Namespace, words: list[str]) -> tuple[Job, Request, Rules]:
    entries = _registry.entries()
    options = Options(asked.model, asked.parameters)
    planned = [entry for entry in entries.values() if not entry.by_name]
    job = read_launch_line(words, planned, _settings.resolve(environ={}), options)
    environ = job.launch.workers
    job = replace(job, settings=_settings.resolve(known_frameworks=entries, environ=environ))
    switch = _settings.switch(environ)
    off = f"{_settings.PREFIX}={environ[_settings.PREFIX].strip()}" if switch == "off" else ""
    named, reach = job.settings.frameworks, {one for one in entries if entries[one].by_name}
    if named and reach.union({job.framework}).isdisjoint(named):
        off = off or f"{_settings.PREFIX}_FRAMEWORKS={','.join(named)}"
    job = replace(job, off=off, unset=switch == "unset")
    entry = entries[job.framework]
    if not entry.plan:  # the registry lacks the ``plan`` of third-party adapters
        entry = _registry.load(entry)
    if not entry.plan:
        raise PlanError(
            f'{job.framework}: its adapter plans no jobs: expected plan="module:function" in it.'
        )
    if version_of(entry.distribution, entry.packages) is None:
        raise PlanError(
            f"{job.framework} is not installed here: its own loader has to read the job's config. "
            "Run the plan in the environment of the job."
        )
    Progress.stage = f"reading the config and the models of {job.framework}'s job"
    try:
        # The config and Hugging Face's cache may depend on variables.
        with _variables(job.launch.named):
            request = pkgutil.resolve_name(entry.plan)(job)
    except (ImportError, PlanError) as error:
        own = re.split(r"[\s=.]", " ".join(words))  # such as in --module=mine.configs
        missing = _missing(error, (*entry.packages, *own))
        if missing is None or "--parameters" in str(error):  # which has another way to go on
            raise
        raise PlanError(
            f"{versioned(entry.distribution, entry.packages[0])}: its own loader, which has to "
            f"read the job's config, lacks a package here: {missing}. Install the package that "
            f"has {missing.name}, or run the plan in the environment of the job."
        ) from error
    rules = Rules(
        asked.transformer_engine or version_of("transformer-engine", ("transformer_engine",)),
        asked.megatron_core or version_of("megatron-core", ("megatron",)),
    )
    return job, request, rules


def _missing(error: BaseException | None, known: Iterable[str]) -> ImportError | None:
    """Find, among an error's causes, the failed import of a package that is not ``known``."""
    while error is not None:
        if isinstance(error, ImportError) and error.name:
            top = error.name.partition(".")[0]
            if top not in known and not top.startswith("precision_shim"):
                return error
        error = error.__cause__
    return None


@contextmanager
def _variables(named: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(named)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _show(asked: argparse.Namespace, job: Job, request: Request, rules: Rules) -> int:
    Progress.stage = "computing the plan"
    plan = make(job, request, rules)
    Progress.stage = "searching" if asked.search else "drawing"
    memory = (asked.gpu_memory or 0) * text.GB
    searches = asked.search and not plan.problems
    found = search(job, request, rules, memory) if searches else []
    if asked.plot:
        plot.draw(plan, Path(asked.plot), asked.gpu_memory)
    if asked.json:
        values = plan.to_dict()
        if searches:
            values["search"] = [asdict(one) for one in found]
        write(json.dumps(values, indent=1))
    else:
        blocks = [text.render(plan, asked.gpu_memory)]
        if searches:
            blocks.append("\n".join(render(found, memory)))
        show("\n\n".join(blocks))
    return 1 if plan.problems else 0
