"""Runs the examples as a user does, in the environment of their framework."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..processes.commands import python
from ..processes.rank_server import Ranks

ROOT = Path(__file__).parents[2]


def run(name: str, framework: str, ranks: Ranks | None = None) -> str:
    """Run one example from a clone, and compare its last lines with ``status()`` of a job in force.

    Args:
        name: the module in ``examples``.
        framework: as ``status()`` names it.
        ranks: the server that forks the process, with the case ``script``; ``None``: a new Python.

    Returns:
        The example's output on both streams.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PRECISION_SHIM")}
    words = ["-m", f"examples.{name}"]
    if ranks is not None:
        ranks("script", world=1, arguments=words, environment=environment, cwd=str(ROOT))
        (said,) = ranks.said
    else:
        ended = python(*words, cwd=ROOT)
        said = ended.stdout + ended.stderr
        assert ended.returncode == 0, said
    status = said[said.index("precision_shim: on\n") :]
    assert f"\n{framework} " in status
    assert "tested: in force\n" in status
    assert "fp16-scaling: loss scaling from 65536" in status
    assert "what is wrong" not in status
    megatrons = ("bf16-dispatch", "int16 masters")  # no example runs Megatron's optimizer
    shown = [one for one in quoted(framework) if not any(word in one for word in megatrons)]
    assert shown
    for one in shown:
        # The reason in brackets differs by version, because verl 0.7.1's FSDP engine has no scaler.
        assert one.partition(" (")[0] in said, "the start page quotes another line"
    lines = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 50, "an example is a screen"
    return said


def quoted(framework: str) -> list[str]:
    """The log lines that the framework's start page quotes, each on one line."""
    page = (ROOT / "docs" / "start" / f"{framework}.md").read_text(encoding="utf-8")
    found = []
    for block in re.findall(r"(?:^ {4}.*\n)+", page, re.MULTILINE):
        lines = " ".join(block.split()).split("[precision_shim] ")
        found += [f"[precision_shim] {one.strip()}" for one in lines[1:]]
    return found
