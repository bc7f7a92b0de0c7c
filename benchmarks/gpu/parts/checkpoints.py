"""Part 5: resume with the shim turned on or off since the checkpoint, as in docs/megatron.md.

Megatron's distributed checkpointing saves and loads the states of the installed FusedAdam. "Off"
means Megatron without the shim.
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
"""Number of steps before a checkpoint, and also after the checkpoint."""
SHARDINGS = ("dp_reshardable", "fully_reshardable", "dp_zero_gather_scatter")
AS_CONFIGURED = "as-configured"
OWN = {"use_precision_aware_optimizer": True}
"""A user's config that makes the optimizer precision-aware even without the shim."""
EXACT, STATES, REFUSED = "exact", "states exact", "refused"
LIKE_OFF = "as from off to off"


@dataclass(frozen=True)
class Side:
    """The shim's settings in a job.

    Attributes:
        on: whether the shim is on.
        states: the value of ``PRECISION_SHIM_OPTIMIZER_STATES``.
        save_on: whether the shim is still on when the checkpoint is written.
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
        name: the row's name in the results.
        saved: settings of the job that saves the checkpoint.
        resumed: settings of the job that resumes from the checkpoint.
        expected: the expected outcome by sharding type; ``""`` stands for all other types.
        fields: the user's fields of Megatron's OptimizerConfig.
    """

    name: str
    saved: Side
    resumed: Side
    expected: Mapping[str, str]
    fields: Mapping[str, Any] = field(default_factory=dict)

    def expects(self, sharding: str) -> str:
        """The expected outcome for a sharding type."""
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
    """Whether two uninterrupted trainings give the same bits on this machine."""
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
    """A training that can be saved and resumed."""

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
        """Run some steps, and return their losses."""
        return [self.made.train_step(self._batches.next())["loss"] for _ in range(self._steps)]

    def go_on(self) -> list[float]:
        """Skip the batches that the saved job has used, then train."""
        for _ in range(self._steps):
            self._batches.next()
        return self.train()

    def held(self) -> dict[str, torch.Tensor]:
        """Copies of parameters, masters and moments."""
        return held(self.made)


def one_row(bench: Bench, row: Row, sharding: str, repeatable: bool) -> None:
    """Save a checkpoint, resume from it, and compare the outcome with the expected one."""
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
    """Save and resume; return the outcome, and the text of an error or ``""``.

    ``EXACT``: states and later losses are equal. ``STATES``: only the states are equal.
    ``REFUSED``: the shim raised an error. The name of an exception class: Megatron or FusedAdam
    raised it. ``"other weights"``: the states differ, and nothing raised an error.
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
        except Exception as error:  # any error of Megatron or FusedAdam
            return type(error).__name__, str(error)[:500]
        if not _same_states(saved, second.held()):
            return "other weights", ""
        return (EXACT if second.go_on() == straight else STATES), ""


def _same_states(saved: Mapping[str, torch.Tensor], loaded: Mapping[str, torch.Tensor]) -> bool:
    # Parameters are not compared, because they are the rounded masters.
    return saved.keys() == loaded.keys() and all(
        torch.equal(saved[key], loaded[key]) for key in saved if not key.endswith(" param")
    )
