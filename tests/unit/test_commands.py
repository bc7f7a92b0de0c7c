"""The command line takes the commands of README and docs, and some are executed here."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from precision_shim_tools.cli import build_parser

from ..pages import page_jobs
from ..pages.documented import PAGES, ROOT, blocks, commands

DOCUMENTED = {one: page.name for page in PAGES for one in commands(page)}


OURS = re.compile(r"precision-shim (?=(doctor|plan|audit|checkpoint|run)\b)")


@pytest.mark.parametrize("command", [one for one in DOCUMENTED if OURS.search(one)])
def test_the_command_line_takes_the_command(command: str) -> None:
    words = shlex.split(OURS.split(command, maxsplit=1)[2])
    if command.rstrip().endswith(" run") or "[" in command:
        return  # a usage line
    assert build_parser().parse_args(words).command is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda one: one.name)
def test_no_block_has_a_job_that_no_test_reads(page: Path) -> None:
    """Every launch line must be in a block that is read as commands, and must be found there."""
    read = {one.shown for one in page_jobs.on_page(page)}
    for block in blocks(page):
        for line in re.sub(r"\s*\\\n\s*", " ", block).splitlines():
            words = line.split("  #")[0].removeprefix("$ ").split()
            if set(words) & set(page_jobs.ENTRIES):
                assert " ".join(words) in read, f"{page.name}: write it as a command: {line}"


# -- executed here -----------------------------------------------------------------------------


def execute(
    command: str, put: Mapping[str, str | None] | None = None, *more: str
) -> subprocess.CompletedProcess[str]:
    """Execute a documented command in its own process.

    Args:
        command: the command as the page shows it.
        put: replacements for words of the page, such as a directory; ``None`` drops a word.
        more: words for the end.
    """
    assert command in DOCUMENTED, f"no page has {command!r} any more"
    words = shlex.split(command)
    variables = {}
    while "=" in words[0]:
        name, _, variables[name] = words.pop(0).partition("=")
    start = {"precision-shim": ["-m", "precision_shim"], "python": []}[words[0]]
    here = ((put or {}).get(word, word) for word in words[1:])
    rest = [word for word in here if word is not None]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PRECISION_SHIM")}
    return subprocess.run(
        [sys.executable, *start, *rest, *more],
        cwd=ROOT,
        env={**inherited, "PYTHONIOENCODING": "utf-8", **variables},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )


@pytest.mark.parametrize("option", ["", "--verbose", "--json"])
def test_doctor(option: str) -> None:
    done = execute("precision-shim doctor", None, *([option] if option else []))
    assert done.returncode == 0
    if option == "--json":
        assert json.loads(done.stdout)
    else:
        assert "start-up file" in done.stdout
        # With Megatron but no TransformerEngine the doctor adds limits: tests/verl/test_doctor.py.
        assert re.search(r"^no problems(, but the limits above)?$", done.stdout, re.MULTILINE)
        assert re.search(r"^OFF in this environment: export", done.stdout, re.MULTILINE)


def test_run() -> None:
    (command,) = (one for one in DOCUMENTED if one.startswith("precision-shim run -- "))
    job = dict.fromkeys(shlex.split(command)[4:])
    done = execute(command, {**job, "python": "true"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(importlib.util.find_spec("verl") is not None, reason="verl is here")
def test_plan_without_the_framework() -> None:
    command, *_ = sorted(one for one in DOCUMENTED if re.search("-shim plan .*verl", one))
    done = execute(command, {"...": "trainer.n_gpus_per_node=8"})
    assert (done.returncode, done.stdout) == (2, "")
    assert "verl is not installed here" in done.stderr


@pytest.mark.parametrize("columns", [60, 200])
def test_lines_fit_the_terminal(columns: int) -> None:
    line = "    master weights   " + "fp32 in all ranks, " * 5 + "on rank 7 too"
    path = "                /an/environment/whose/python/is/" + "deep/" * 12 + "python"
    code = f"from precision_shim_tools.cli._output import show; show({line!r}); show({path!r})"
    ours, terminal = pty.openpty()
    env = {**os.environ, "COLUMNS": str(columns), "NO_COLOR": "1"}
    subprocess.run([sys.executable, "-c", code], stdout=terminal, env=env, check=True)
    os.close(terminal)
    *shown, last = os.read(ours, 4096).decode().splitlines()
    os.close(ours)
    assert last == path  # which no line is long enough for, and which keeps its indent
    assert max(map(len, shown)) <= columns
    assert [one[:4].strip() for one in shown] == [""] * len(shown)
    assert " ".join(" ".join(shown).split()) == " ".join(line.split())
    assert (len(shown) == 1) is (columns == 200)
