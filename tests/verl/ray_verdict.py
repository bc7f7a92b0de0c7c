"""The assertions on the workers of ``ray_driver.py`` with the shim, for every backend."""

from __future__ import annotations

import math
from typing import Any


def trained_skipped_and_resumed(found: dict[str, Any], scales: list[float]) -> None:
    """Both ranks skip two of six steps, and new actors resume with the old actors' state.

    Args:
        found: the driver's results for one backend.
        scales: the loss scale of each step.
    """
    start = found["start"]
    assert len({found["driver"], *(one["pid"] for one in start)}) == 3
    assert all(one["wrapped"] for one in start)
    assert [one["tools"] for key in ("end", "same end") for one in found[key]] == [[]] * 4
    # The second and the fifth step overflow on one rank, and both ranks skip these steps.
    said = [*found["steps"], *found["on"]]
    assert [one["skipped_steps"][0] for one in said] == [0, 1, 1, 1, 2, 2]
    assert [math.isnan(one["grad_norm"][0]) for one in said] == [False, True, False] * 2
    assert [one["loss_scale"][0] for one in said] == scales
    trained, skipped = ([one["parameters"] for one in found[key]] for key in ("taken", "skipped"))
    assert trained == skipped != [one["parameters"] for one in start]
    # New actors resume with the state of the old actors.
    assert {one["pid"] for one in start}.isdisjoint(one["pid"] for one in found["resumed"])
    for before, after in (("saved", "resumed"), ("end", "same end")):
        for old, new in zip(found[before], found[after], strict=True):
            assert old["parameters"] == new["parameters"]
