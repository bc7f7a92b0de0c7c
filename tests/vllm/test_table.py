"""The benchmark's table, and its insertion into the page."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest


def test_each_pair_has_median_least_and_greatest(both_sides: ModuleType) -> None:
    pairs = [(one, other) for other in both_sides.DTYPES for one in both_sides.DTYPES]
    runs = [
        {
            pair: both_sides.Mismatch(mean=0.25 * seed, k3=(0.5 if "bf16" in pair else 2e-5) * seed)
            for pair in (*pairs, ("fp16", both_sides.WIRE))
        }
        for seed in (3, 1, 2)
    ]
    head, line, *rows = both_sides.table(runs).splitlines()
    assert head.count(" | ") == line.count("|") - 2 == 4
    assert [tuple(row.strip("| ").split(" | ")[:2]) for row in rows] == [
        *sorted(pairs, key=lambda pair: list(both_sides.DTYPES).index(pair[0])),
        ("fp16", both_sides.WIRE),
    ]
    assert rows[0].endswith(
        "| 0.5 (0.25 to 0.75) | 4.0e-5 (2.0e-5 to 6.0e-5) | 4.0e-5 (4.0e-5 to 4.0e-5) |"
    )
    assert rows[1].endswith("| 0.5 (0.25 to 0.75) | 1 (0.5 to 1.5) | 1 (1 to 1) |")


def test_the_table_of_heads_compares_with_no_head(both_sides: ModuleType) -> None:
    runs = [
        {
            (dtype, who): both_sides.Mismatch(mean=0.5, k3=0.5 if who == "both" else 1.0 * seed)
            for dtype in ("fp16", "bf16")
            for who in both_sides.HEADS
        }
        for seed in (1, 2)
    ]
    head, line, *rows = both_sides.head_table(runs).splitlines()
    assert head.count(" | ") == line.count("|") - 2 == 4
    assert [tuple(row.strip("| ").split(" | ")[:2]) for row in rows] == list(runs[0])
    assert [row.endswith("| 1 (1 to 1) |") for row in rows] == [True, True, True, False] * 2
    assert rows[3].endswith("| 0.38 (0.25 to 0.5) |")


def test_the_table_goes_between_the_pages_markers(both_sides: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "both-sides.md"
    text = f"before\n{both_sides.BEGIN}\nold\n{both_sides.END}\nafter\n"
    page.write_text(text, encoding="utf-8")
    assert both_sides.with_table(page, "new") == text.replace("old", "new")
    for wrong in ("before", text + text):
        page.write_text(wrong, encoding="utf-8")
        with pytest.raises(ValueError, match=r"both-sides\.md should have"):
            both_sides.with_table(page, "new")
