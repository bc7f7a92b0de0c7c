"""The table of benchmarks/rl_mismatch.py, and the docs page that contains it."""

from __future__ import annotations

import re

from benchmarks import both_sides, rl_mismatch
from examples.demo.rl.results import Course


def course(k3: list[float], reward: list[float]) -> Course:
    steps = [float(step) for step in range(1, len(k3) + 1)]
    return Course(steps, reward, k3, k3, [], [], steps)


def test_each_pair_has_the_spread_of_each_part() -> None:
    runs = [
        course([0.1 * seed] * 2 + [0.2] * 2 + [seed] * 2, [0, 0, 0, 0, 0.5, 1])
        for seed in (3, 1, 2)
    ]
    head, line, row = rl_mismatch.table({"a pair": runs}, 6).splitlines()
    assert head.count("|") == line.count("|") == row.count("|") == 6
    assert "k3, steps 3 to 4" in head
    assert (
        row == "| a pair | 0.2 (0.1 to 0.3) | 0.2 (0.2 to 0.2) | 2 (1 to 3) | 0.75 (0.75 to 0.75) |"
    )


def test_the_page_has_the_pairs_in_their_order() -> None:
    """The mismatch is least if trainer and rollout are in fp16, even if weights go through bf16."""
    page = rl_mismatch.PAGE.read_text(encoding="utf-8")
    begin, end = rl_mismatch.MARKERS
    rows = page.split(begin)[1].split(end)[0].strip().splitlines()[2 : 2 + len(rl_mismatch.PAIRS)]
    assert [row.split(" | ")[0].strip("| ") for row in rows] == [
        one.title for one in rl_mismatch.PAIRS
    ]
    first = [float(re.findall(r"[\d.e-]+", row.split(" | ")[1])[0]) for row in rows]
    assert first[2] < first[3] < min(first[:2])


def test_a_page_without_markers_is_refused_before_the_runs() -> None:
    assert both_sides.with_table(rl_mismatch.PAGE, "new", rl_mismatch.MARKERS).count("\nnew\n") == 1
