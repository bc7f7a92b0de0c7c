"""Part 5: checkpoints with the shim turned on or off in between, as the table of docs/megatron.md.

Written and read by Megatron's distributed checkpointing, with the states of the FusedAdam that is
here. "Off" is the unpatched Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..bench import Bench
from ..models import MIDDLE, TINY, WHOLE_TABLE, held, same, shim, trainer
from ..text import Batches, corpus

STEPS, DRY_STEPS = 2, 1
"""Before a checkpoint, and after it."""
SHARDINGS = ("dp_reshardable", "fully_reshardable", "dp_zero_gather_scatter")
AS_CONFIGURED = "as-configured"
OWN = {"use_precision_aware_optimizer": True}
"""A user's own config that makes the optimizer precision-aware, with the shim and without."""
EXACT, STATES, REFUSED = "exact", "states exact", "refused"
LIKE_OFF = "as from off to off"


@dataclass(frozen=True)
class Side:
    """How a job is run.

    Attributes:
        on: whether the shim is.
        states: its ``PRECISION_SHIM_OPTIMIZER_STATES``.
        save_on: whether it still is when the checkpoint is written.
    """

    on: bool
    states: str = WHOLE_TABLE
    save_on: bool = True

    def __str__(self) -> str:
        return f"on ({self.states})" if self.on else "off"


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        name: what it is.
        saved: how it was saved.
        resumed: how it is resumed.
        expected: by sharding type; ``""`` for those that are not named.
        fields: the user's own, for Megatron's OptimizerConfig.
    """

    name: str
    saved: Side
    resumed: Side
    expected: Mapping[str, str]
    fields: Mapping[str, Any] = field(default_factory=dict)

    def expects(self, sharding: str) -> str:
        """What is to come of it."""
        return self.expected.get(sharding, self.expected[""])


ON, OFF, ON_AS_CONFIGURED = Side(True), Side(False), Side(True, AS_CONFIGURED)
ROWS = (
    Row("on, on", ON, ON, {"": EXACT}),
    Row("on, off", ON, OFF, {"": STATES}),
    Row("off, on", OFF, ON, {"": REFUSED}),
    Row("off, on as configured", OFF, ON_AS_CONFIGURED, {"": EXACT}),
    Row("own config, on, off", ON_AS_CONFIGURED, OFF, {"": LIKE_OFF}, OWN),
    Row("own config, on, on", ON_AS_CONFIGURED, ON_AS_CONFIGURED, {"": EXACT}, OWN),
    Row(
        "remainders written without the shim, on",
        Side(True, save_on=False),
        ON,
        {"dp_reshardable": STATES, "": REFUSED},
    ),
)


def run(bench: Bench) -> None:
    with bench.place.repeatable():
        repeatable = control(bench)
        for sharding in SHARDINGS:
            for row in ROWS:
                with bench.attempt(f"{row.name}, {sharding}"):
                    one_row(bench, row, sharding, repeatable)


def control(bench: Bench) -> bool:
    """Whether two trainings that nobody stopped give the same bits on this machine."""
    ends = []
    for _ in range(2):
        with shim():
            job = Job(bench, SHARDINGS[0], {})
            job.train()
            job.train()
            ends.append(job.held())
    repeatable = same(*ends)
    bench.record(
        "two trainings that were not stopped",
        "the same bits" if repeatable else "differ: further losses cannot be compared",
        repeatable=repeatable,
    )
    return repeatable


class Job:
    """A training that can be kept and resumed."""

    def __init__(
        self, bench: Bench, sharding: str, fields: Mapping[str, Any], seed: int = 0
    ) -> None:
        place = bench.place
        self._size = TINY if bench.dry else MIDDLE
        self._device = place.device
        self._steps = DRY_STEPS if bench.dry else STEPS
        self.made = trainer(place, self._size, seed=seed, sharding=sharding, optimizer=fields)
        self._batches = Batches(corpus()[0], self._size, place.device, seed=0)

    def train(self) -> list[float]:
        """Some steps; their losses."""
        return [self.made.train_step(self._batches.next())["loss"] for _ in range(self._steps)]

    def go_on(self) -> list[float]:
        """As many after those that were saved."""
        for _ in range(self._steps):
            self._batches.next()
        return self.train()

    def held(self) -> dict[str, torch.Tensor]:
        """What is trained and what the optimizer holds."""
        return held(self.made)


def one_row(bench: Bench, row: Row, sharding: str, repeatable: bool) -> None:
    """Save, resume, and hold what came of it against what was expected."""
    folder = bench.folder / f"{row.name} {sharding}".replace(" ", "-").replace(",", "")
    found, error = outcome(bench, row, sharding, folder)
    expected = row.expects(sharding)
    if expected == LIKE_OFF:
        by_itself = Row(row.name, OFF, OFF, row.expected, row.fields)
        expected, _ = outcome(bench, by_itself, sharding, folder.with_name(f"{folder.name}-off"))
    what = f"{row.name}, {sharding}"
    bench.record(
        what,
        found,
        saved=str(row.saved),
        resumed=str(row.resumed),
        sharding=sharding,
        expected=expected,
        found=found,
        error=error,
    )
    says = f"{what}: {expected}"
    if expected == EXACT and found == STATES and not repeatable:
        bench.check(says, None, "the states are exact; further losses cannot be compared here")
    else:
        bench.check(says, found == expected or (expected, found) == (STATES, EXACT), found=found)


def outcome(bench: Bench, row: Row, sharding: str, folder: Path) -> tuple[str, str]:
    """What comes of a resume, and the error if it was one.

    ``EXACT``: states and further losses; ``STATES``: the states alone; ``REFUSED``: by the shim;
    an error's name: by Megatron or FusedAdam; ``"other weights"``: without a word.
    """
    from precision_shim import CheckpointLayoutError

    with shim(row.saved.on, row.saved.states):
        first = Job(bench, sharding, row.fields)
        first.train()
        if row.saved.save_on:
            first.made.save(str(folder))
    if not row.saved.save_on:
        first.made.save(str(folder))
    saved = first.held()
    straight = first.train()
    with shim(row.resumed.on, row.resumed.states):
        second = Job(bench, sharding, row.fields, seed=1)
        try:
            second.made.load(str(folder))
        except CheckpointLayoutError as error:
            return REFUSED, str(error)
        except Exception as error:  # Megatron's or FusedAdam's own, whatever it is
            return type(error).__name__, str(error)[:500]
        if not _same_states(saved, second.held()):
            return "other weights", ""
        return (EXACT if second.go_on() == straight else STATES), ""


def _same_states(saved: Mapping[str, torch.Tensor], loaded: Mapping[str, torch.Tensor]) -> bool:
    # The rounded parameters follow from the masters.
    return saved.keys() == loaded.keys() and all(
        torch.equal(saved[key], loaded[key]) for key in saved if not key.endswith(" param")
    )
