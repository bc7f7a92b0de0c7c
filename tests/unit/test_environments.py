"""tox.ini runs every pinned version, and the newest of a framework where most is tested."""

from __future__ import annotations

import configparser
import re
import runpy
import sys
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest

from precision_shim_adapters.frameworks import FRAMEWORKS

from ..environments.record_symbols import pinned

ROOT = Path(__file__).parents[2]


def each(text: str) -> set[str]:
    """The names in a list of tox's, with their braces expanded."""
    found = set()
    for word in re.findall(r"(?:[^\s,{}]|\{[^}]*\})+", text):
        parts = [part.strip("{}").split(",") for part in re.split(r"(\{[^}]*\})", word)]
        found |= {"".join(one) for one in product(*parts)}
    return found


def tox_ini() -> configparser.ConfigParser:
    ini = configparser.ConfigParser(interpolation=None)
    ini.read(ROOT / "tox.ini")
    return ini


def test_every_pinned_version_is_run() -> None:
    ini = tox_ini()
    before_a_commit = each(ini["tox"]["env_list"])
    labels = dict(
        line.split(" = ") for line in re.sub(r"\\\n", "", ini["tox"]["labels"]).strip().split("\n")
    )
    matrix = each(labels["matrix"])
    assert set(pinned()) <= before_a_commit | matrix
    for one in FRAMEWORKS:
        newest = f"{one.framework}-{one.tested[-1]}"
        # The tests that are marked slow have an environment of their own.
        assert newest not in before_a_commit or f"{newest}-slow" in matrix


def test_a_version_needs_no_commands_of_its_own() -> None:
    conditions = re.findall(r"^(\S+): ", tox_ini()["framework"]["commands"], re.MULTILINE)
    for one in FRAMEWORKS:
        if one.framework == "megatron":  # runs beside each framework
            continue
        words = set(one.framework.split("-"))
        own = [line for line in conditions if words & set(re.findall(r"[\w.]+", line))]
        assert own, f"{one.framework} would run nothing, and pass"
        assert one.tested[-1] not in " ".join(own), "a later version would run something else"


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("commit", ["", "1867+g61a1251d7"])
def test_a_build_of_a_tree_without_git_says_so(
    monkeypatch: pytest.MonkeyPatch, commit: str
) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (fallback,) = re.findall(r'^fallback-version = "(.*)0"$', text, re.MULTILINE)
    built = ModuleType("precision_shim._version")
    vars(built)["__version__"] = f"{fallback}{commit or 0}"
    monkeypatch.setitem(sys.modules, built.__name__, built)
    version = runpy.run_module("precision_shim._about")["__version__"]
    assert version == f"{fallback}{commit or '0+source.without.git'}"
