"""Part 4: fp16 under Megatron and under FSDP2.

A step that overflows changes no parameter, and lowers the scale. A resumed training equals an
uninterrupted one bit for bit. The shim's LossScaler gives the same steps as torch's own scaler,
and waits for the device equally often.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..bench import Bench
from ..fsdp_loop import Loop
from ..models import SMALL, TINY, config_of, differing, held, same, shim, trainer
from ..place import NOT_COUNTED
from ..text import Batches, corpus

OVERFLOW = 1e30
"""Factor of the loss with which fp16 gradients are infinite but the loss is finite."""
BEFORE, AFTER = 2, 3
"""Numbers of steps before and after the overflows."""
NOT_REPEATABLE = "two trainings that were not stopped differ here already"


def run(bench: Bench) -> None:
    with bench.place.repeatable():
        overflow(bench)
        resume(bench)
        fsdp(bench)


# -- Megatron --------------------------------------------------------------------------------


class Job:
    """An fp16 training under Megatron, some of whose steps overflow."""

    def __init__(self, bench: Bench, seed: int = 0) -> None:
        place = bench.place
        size = TINY if bench.dry else SMALL
        self.made = trainer(place, size, "float16", seed=seed)
        text = Batches(corpus()[0], size, place.device, seed=0)
        self.hysteresis = int(config_of(self.made).hysteresis)
        self.overflowing = range(BEFORE, BEFORE + self.hysteresis)
        self.steps = BEFORE + self.hysteresis + AFTER
        self.batches = [text.next() for _ in range(self.steps)]

    @property
    def scale(self) -> float:
        """The loss scale of the next step."""
        return float(self.made.optimizer.get_loss_scale())

    def step(self, number: int) -> dict[str, float]:
        """Run the step with this number."""
        weight = OVERFLOW if number in self.overflowing else 1.0
        figures: dict[str, float] = self.made.train_step(self.batches[number], weight)
        return figures

    def steps_of(self, numbers: Sequence[int]) -> Job:
        """Run the steps with these numbers."""
        for number in numbers:
            self.step(number)
        return self


def overflow(bench: Bench) -> None:
    """Run the steps one by one, and check what each step changes."""
    rows: list[dict[str, Any]] = []
    with shim():
        job = Job(bench)
        for number in range(job.steps):
            before, scale = held(job.made), job.scale
            weight = OVERFLOW if number in job.overflowing else 1.0
            job.made.forward_backward(job.batches[number], weight)
            with bench.place.host_syncs() as syncs:
                figures = job.made.update()
            rows.append(
                {
                    "step": number,
                    "overflow": number in job.overflowing,
                    "unchanged": same(before, held(job.made)),
                    "scale": scale,
                    "scale_after": job.scale,
                    "host_syncs": syncs.count,
                    **figures,
                }
            )
    skipped = [row for row in rows if row["overflow"]]
    taken = [row for row in rows if not row["overflow"]]
    bench.record(
        "Megatron, overflow",
        f"{len(skipped)} of {len(rows)} steps overflowed; scale {rows[0]['scale']:g} to "
        f"{job.scale:g}; host synchronisations of a skipped step "
        f"{counted(skipped)}, of a taken one {counted(taken)}",
        hysteresis=job.hysteresis,
        steps=rows,
    )
    bench.check(
        "Megatron: a step changes parameters and states if and only if it does not overflow",
        all(row["unchanged"] == row["overflow"] for row in rows),
    )
    bench.check(
        f"Megatron: overflow {job.hysteresis} in a row, its hysteresis, halves the scale",
        skipped[-1]["scale_after"] == skipped[0]["scale"] / 2,
        before=skipped[0]["scale"],
        after=skipped[-1]["scale_after"],
    )
    bench.check_on_gpu(
        "Megatron: a skipped step waits for the device no more often than a taken one",
        most(skipped) <= most(taken),
        NOT_COUNTED,
    )


def counted(rows: list[dict[str, Any]]) -> str:
    """The numbers of host synchronisations of some steps, as text."""
    counts = sorted({row["host_syncs"] for row in rows if row["host_syncs"] is not None})
    return " or ".join(map(str, counts)) if counts else "not counted"


def most(rows: list[dict[str, Any]]) -> int:
    """The largest number of host synchronisations in one step."""
    return max((row["host_syncs"] or 0 for row in rows), default=0)


def resume(bench: Bench) -> None:
    """Resume from a checkpoint after the overflows; compare with an uninterrupted training."""
    with shim():
        ends = []
        for _ in range(2):
            job = Job(bench)
            job.steps_of(range(job.steps))
            ends.append((held(job.made), job.scale))
        half = Job(bench)
        stop = BEFORE + half.hysteresis + 1
        half.steps_of(range(stop)).made.save(str(bench.folder / "megatron"))
        resumed = Job(bench, seed=1)
        resumed.made.load(str(bench.folder / "megatron"))
        resumed.steps_of(range(stop, resumed.steps))
        last = held(resumed.made), resumed.scale
    report_resume(bench, "Megatron", ends, last)


def report_resume(
    bench: Bench, where: str, ends: list[tuple[Any, float]], resumed: tuple[Any, float]
) -> None:
    repeatable = same(ends[0][0], ends[1][0]) and ends[0][1] == ends[1][1]
    exact = same(ends[0][0], resumed[0]) and ends[0][1] == resumed[1]
    unlike = differing(ends[0][0], resumed[0])
    bench.record(
        f"{where}, stopped and resumed",
        f"{len(unlike)} of {len(resumed[0])} tensors differ, loss scale {resumed[1]:g}",
        repeatable=repeatable,
        differing=unlike[:20],
        scales=[ends[0][1], resumed[1]],
    )
    says = f"{where}: a training that was stopped and resumed is the one that was not, bit for bit"
    if repeatable:
        bench.check(says, exact)
    else:
        bench.check(says, None, NOT_REPEATABLE)


# -- FSDP2 -----------------------------------------------------------------------------------


def fsdp(bench: Bench) -> None:
    """Compare the shim's scaler with torch's own in the same loop."""
    device = bench.place.device
    loops = {ours: Loop(ours, device, wide=not bench.dry) for ours in (True, False)}
    weights = [1.0, 1.0, OVERFLOW, 1.0, 1.0]
    rows = [_both(bench, loops, weight) for weight in weights]
    bench.record(
        "FSDP2, LossScaler beside a loop by hand",
        f"host synchronisations per step: {_counts(rows, 'ours')} with the shim's LossScaler, "
        f"{_counts(rows, 'by_hand')} by hand; {sum(row['same'] for row in rows)} of {len(rows)} "
        "steps the same bits",
        steps=rows,
        counting=NOT_COUNTED if bench.dry else "torch.cuda.set_sync_debug_mode",
    )
    bench.check(
        "FSDP2: with the LossScaler every step gives the bits and the scale of the loop by hand",
        all(row["same"] for row in rows),
    )
    bench.check(
        "FSDP2: a step changes the parameters if and only if it does not overflow",
        all(row["unchanged"] == row["overflow"] for row in rows),
    )
    bench.check_on_gpu(
        "FSDP2: a step with the LossScaler waits for the device as often as the loop by hand",
        all(row["ours"] == row["by_hand"] for row in rows),
        NOT_COUNTED,
    )
    _fsdp_resume(bench, bench.folder / "fsdp")


def _both(bench: Bench, loops: dict[bool, Loop], weight: float) -> dict[str, Any]:
    before = loops[True].held()
    counts = {}
    for ours, loop in loops.items():
        with bench.place.host_syncs() as syncs:
            loop.step(weight)
        counts[ours] = syncs.count
    now = {ours: loop.held() for ours, loop in loops.items()}
    scales = [float(loop.scaler.get_scale()) for loop in loops.values()]
    parameters = [key for key in before if key.endswith("param")]
    return {
        "overflow": weight != 1.0,
        "ours": counts[True],
        "by_hand": counts[False],
        "same": same(now[True], now[False]) and scales[0] == scales[1],
        "unchanged": all(torch.equal(before[key], now[True][key]) for key in parameters),
        "scale_after": scales[0],
    }


def _counts(rows: list[dict[str, Any]], which: str) -> str:
    found = [row[which] for row in rows]
    return "not counted" if None in found else "/".join(map(str, found))


def _fsdp_resume(bench: Bench, folder: Path) -> None:
    weights = [1.0, OVERFLOW, 1.0, 1.0]
    stop = 2
    ends = []
    for _ in range(2):
        loop = _steps(Loop(True, bench.place.device, wide=not bench.dry), weights)
        ends.append((loop.held(), float(loop.scaler.get_scale())))
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    _steps(Loop(True, bench.place.device, wide=not bench.dry), weights[:stop]).save(folder)
    resumed = Loop(True, bench.place.device, wide=not bench.dry, seed=1)
    resumed.load(folder)
    _steps(resumed, weights, first=stop)
    last = resumed.held(), float(resumed.scaler.get_scale())
    report_resume(bench, "FSDP2", ends, last)


def _steps(loop: Loop, weights: Sequence[float], first: int = 0) -> Loop:
    for number in range(first, len(weights)):
        loop.step(weights[number], number)
    return loop
