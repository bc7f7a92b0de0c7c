"""tox.ini runs every pinned version, and the newest of a framework where most is tested."""

from __future__ import annotations

import configparser
import re
from itertools import product
from pathlib import Path

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
