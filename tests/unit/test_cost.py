"""The tables of docs/cost.md: what ``benchmarks/cost.py`` makes of its figures."""

from __future__ import annotations

import importlib.util
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
NOT_YET = "Not measured yet on an idle machine."


@pytest.fixture(scope="module")
def cost() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cost", ROOT / "benchmarks" / "cost.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass reads sys.modules
    spec.loader.exec_module(module)
    return module


def table_of(cost: ModuleType, **added: float) -> str:
    """The table for workers that import in 10 s, and with the shim in so many seconds more."""
    lines = [cost.HEAD]
    for name, more in added.items():
        times = {"without": [10.0, 10.1, 9.9], "again": [10.1, 10.0, 10.0]}
        times["this build"] = [one + more for one in times["without"]]
        cases = [cost.Case(case, (), ROOT, each, [500.0] * 3) for case, each in times.items()]
        lines += cost.rows(name, cases)
    return "\n".join(lines)


def test_the_sentence_names_the_slowest_and_holds_it_against_the_spread(cost: ModuleType) -> None:
    table = table_of(cost, first=0.5, second=2.0, third=1.0)
    said = cost.summary(table)
    assert "second's: +2.00 (x 1.200) s of 10.00 s, more than the -0.10 to +0.10 s" in said
    assert "within" in cost.summary(table_of(cost, first=0.05))
    assert "less than" in cost.summary(table_of(cost, first=-1.0))


def test_a_row_that_takes_minutes_is_of_this_build_alone(
    cost: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "one" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    words = ("-c", "import sys; sys.exit(2)")
    commands = dict.fromkeys(("short", "long"), ("one", words)) | {"not here": ("two", words)}
    monkeypatch.setattr(cost, "COMMANDS", commands)
    monkeypatch.setattr(cost, "LONG", {"long"})
    asked = Namespace(folder=tmp_path, only=None, rounds=1, write=False)
    table = cost.commands(asked, {"this build": ROOT, "the other build": ROOT})
    assert [row.count(" s |") for row in table] == [0, 0, 2, 1]
    asked.write = True
    with pytest.raises(SystemExit, match="should have two: nothing written"):
        cost.commands(asked, {"this build": ROOT})


def test_a_table_comes_between_its_markers_alone(cost: ModuleType) -> None:
    page = cost.PAGE.read_text(encoding="utf-8")
    written = cost.with_block(page, cost.IMPORTS, "a table")
    assert f"{cost.IMPORTS[0]}\na table\n{cost.IMPORTS[1]}" in written
    other = page.partition(cost.COMMANDS_OF[0])[2]
    assert written.endswith(other)
    with pytest.raises(SystemExit, match="once"):
        cost.with_block("no markers", cost.IMPORTS, "a table")


def test_the_page_says_what_its_tables_show(cost: ModuleType) -> None:
    page = cost.PAGE.read_text(encoding="utf-8")
    inner = [
        page.partition(begin)[2].partition(end)[0].strip()
        for begin, end in (cost.IMPORTS, cost.COMMANDS_OF)
    ]
    assert (inner[0] == NOT_YET) == (inner[1] == NOT_YET)
    if inner[0] != NOT_YET:
        table, _, said = inner[0].partition("\n\n")
        assert said == cost.summary(table)
        assert all(f"| {name} | without |" in table for name in cost.WORKERS)
        assert all(f"| {name} |" in inner[1] for name in cost.COMMANDS)
