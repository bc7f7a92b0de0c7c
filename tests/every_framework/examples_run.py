"""Runs the examples as a user does, in the environment of their framework."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from ..processes.rank_server import Ranks, run_module

ROOT = Path(__file__).parents[2]


def run(name: str, framework: str, server: Ranks | None = None) -> str:
    """Run one example from a clone, and compare its last lines with ``status()`` of a job in force.

    Args:
        name: the module in ``examples``.
        framework: as ``status()`` names it.
        server: the server that forks the example's process; ``None``: a new Python.

    Returns:
        The example's output on both streams.
    """
    code, said = run_module(server, f"examples.{name}") if server else _in_a_new_python(name)
    assert code == 0, said
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


def _in_a_new_python(name: str) -> tuple[int, str]:
    ended = subprocess.run(
        [sys.executable, "-m", f"examples.{name}"],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("PRECISION_SHIM")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stdout


def quoted(framework: str) -> list[str]:
    """The log lines that the framework's start page quotes, each on one line."""
    page = (ROOT / "docs" / "start" / f"{framework}.md").read_text(encoding="utf-8")
    found = []
    for block in re.findall(r"(?:^ {4}.*\n)+", page, re.MULTILINE):
        lines = " ".join(block.split()).split("[precision_shim] ")
        found += [f"[precision_shim] {one.strip()}" for one in lines[1:]]
    return found
