"""If one environment leaves tests to another, both agree in all that these tests need."""

from __future__ import annotations

import ast
import configparser
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEFT_OUT = (
    "tests/activation/test_ray.py",
    "tests/audit/test_command.py",
    "tests/audit/test_torch.py",
    "tests/audit/test_updates.py",
    "tests/audit/test_updates_groups.py",
    "tests/scaling/hand_written.py",
    "tests/scaling/ranks.py",
    "tests/scaling/saving.py",
    "tests/scaling/test_files.py",
    "tests/scaling/test_ranks.py",
    "tests/testing/test_fused_adam.py",
)
"""What system-0.7.1 leaves to system-0.9.1."""

AT_A_RELEASE = ("tests/cli/test_demo.py", "tests/gpu")
"""Tests that run with verl 0.7.1 only before a release, in system-0.7.1-slow."""

STANDS_ON = {
    *("ray", "torch", "cloudpickle", "hypothesis", "pytest"),
    *("precision_shim", "precision_shim_adapters"),
}
"""Packages that these files may import, besides Python's own: the pinned ones, and ours."""


def commands(environment: str) -> list[str]:
    """The command of a system environment, from tox.ini."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    (section,) = (one for one in tox.sections() if one.startswith("testenv:{verl,system}"))
    lines = dict(
        line.split(": ", 1) for line in tox[section]["commands"].splitlines() if line.count(": ")
    )
    other = {
        "system-0.7.1": "system-0.7.1-!slow",
        "system-0.7.1-slow": "system-0.7.1-slow",
        "system-0.9.1": "system-!0.7.1",
    }[environment]
    (found,) = re.findall(r"\{posargs:(.*)\}", lines[other])
    return found.split()


def pins(version: str) -> dict[str, str]:
    """The versions that a verl environment pins, by package."""
    text = (ROOT / "tests" / "environments" / f"verl-{version}.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w-]+)==(\S+)", text, re.MULTILINE))


def files(paths: list[str]) -> set[str]:
    """All Python files below the paths, those without tests included."""
    found: set[str] = set()
    for one in paths:
        path = ROOT / one
        inner = path.rglob("*.py") if path.is_dir() else [path]
        found |= {each.relative_to(ROOT).as_posix() for each in inner}
    return found


def test_system_071_leaves_out_what_is_named_here_and_system_091_has_it() -> None:
    later = commands("system-0.7.1-slow")
    assert sorted(later) == sorted(AT_A_RELEASE)
    all_of_it, less = files(commands("system-0.9.1")), files(commands("system-0.7.1") + later)
    left_out = {one for one in all_of_it - less if Path(one).name.startswith("test_")}
    assert left_out == {one for one in LEFT_OUT if Path(one).name.startswith("test_")}
    assert less <= all_of_it


@pytest.mark.parametrize("package", ["ray", "torch"])
def test_what_is_left_out_stands_on_one_version(package: str) -> None:
    assert pins("0.7.1")[package] == pins("0.9.1")[package]


def test_the_newest_megatron_core_stands_beside_the_same_packages() -> None:
    before, after = pins("0.9.1"), pins("0.9.1-core-0.19.2")
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert changed == {"megatron-core", "megatron-bridge"}


@pytest.mark.parametrize("file", LEFT_OUT)
def test_what_is_left_out_imports_nothing_else(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    names = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(text))
        for name in (
            [one.name for one in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom) and not node.level
            else []
        )
    }
    assert names - STANDS_ON - set(sys.stdlib_module_names) == set()
    # The programs that a test starts must not import verl, Megatron or transformers either.
    assert not re.search(r"^\s*(from|import) (verl|megatron|transformers)\b", text, re.MULTILINE)
