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


def figures(cost: ModuleType, **added: float) -> dict[str, dict[str, list[float]]]:
    """Each act takes 20 ms, and in a process with this name so many ms more."""
    names = {one for _, *both in cost.ROWS.values() for one in both}
    rounds = [20.0, 22.0, 18.0]
    found = {name: [one + added.get(name, 0.0) for one in rounds] for name in names}
    found |= {f"{one}, again": [19.0, 23.0, 18.0] for one in ("bf16", "fp16")}
    return dict.fromkeys(("audit", *(act for act, *_ in cost.ROWS.values())), found)


def test_a_difference_beyond_the_spread_stands_out(cost: ModuleType) -> None:
    """The spread is that of two runs without the shim, whichever of them comes first."""
    more = {"bf16, shim": 0.9, "fp16, shim": 1.5, "bf16, audited": -3.0}
    found = {"first": figures(cost), "second": figures(cost, **more)}
    table = cost.training_table(found)
    assert "\n| step in bf16 | 19.5 +0.00 (± 1.00) | 19.5 +0.90 (± 1.00) |\n" in table
    assert "\n| step in fp16 | 19.5 +0.00 (± 1.00) | 19.5 **+1.50** (± 1.00) |\n" in table
    assert table.endswith("\n| a call of `audit()` | 20.0 | 20.9 |")
    assert cost.training_summary(table) == (
        "± is the median difference of two runs without the shim, and a bold figure is above it. "
        "On a step in bf16 the shim adds no more than that. On a step in fp16 the shim adds "
        "more than that on second (+1.50 of 19.5 ms); on the others it does not. "
        "Of the other 10 differences, 2 are above it."
    )


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
        for begin, end in (cost.IMPORTS, cost.COMMANDS_OF, cost.TRAINED)
    ]
    assert (inner[0] == NOT_YET) == (inner[1] == NOT_YET)
    if inner[0] != NOT_YET:
        table, _, said = inner[0].partition("\n\n")
        assert said == cost.summary(table)
        assert all(f"| {name} | without |" in table for name in cost.WORKERS)
        assert all(f"| {name} |" in inner[1] for name in cost.COMMANDS)
    steps, _, said = inner[2].partition("\n\n")
    assert said == cost.training_summary(steps)
    assert steps.startswith(f"| ms | {' | '.join(cost.TRAININGS)} |\n")
    assert all(f"\n| {name} | " in steps for name in (*cost.ROWS, cost.AUDIT))
