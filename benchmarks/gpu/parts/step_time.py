"""Part 2: the time of the optimizer's step, compared with the bytes that a step must move.

TransformerEngine's pull request 2551 reports that bf16 moments cost one to two seconds a step. Up
to 2.13 FusedAdam copies each moment that is not fp32 to fp32 before its kernel runs. The copy takes
time, and its allocation takes time if little memory is free. This part therefore measures the step
with ample and with little free memory, and counts the allocator's calls.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch

from ..bench import Bench
from ..models import BILLION, TINY, inner, parameters_of, shim, trainer
from ..place import NO_TIMES
from ..text import Batches, corpus
from .memory import VARIANTS, WITH, WITHOUT, Variant

WARM, DRY_WARM = 3, 1
REPEAT, DRY_REPEAT = 20, 2
TIGHT = 1.25
"""Free memory divided by a step's temporary memory, in the case with little free memory."""
FP32_MOMENTS = Variant(
    "with, fp32 moments",
    14.0,
    fields={
        "use_precision_aware_optimizer": True,
        "main_grads_dtype": "bf16",
        "exp_avg_dtype": "fp32",
        "exp_avg_sq_dtype": "fp32",
    },
)


@dataclass(frozen=True)
class Times:
    """Milliseconds of some steps."""

    first: float
    steps: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median of the steps."""
        return statistics.median(self.steps)

    @property
    def spread(self) -> float:
        """Interquartile range of the steps; the full range of fewer than four steps."""
        if len(self.steps) < 4:
            return max(self.steps) - min(self.steps)
        low, _, high = statistics.quantiles(self.steps, n=4)
        return high - low


def run(bench: Bench) -> None:
    copied = bench.place.copy_bandwidth()
    bandwidth = copied["per_second"]
    bench.record("a copy on the device", f"{bandwidth / 1e12:.3f} TB/s, read and written", **copied)
    times: dict[str, Times] = {}
    for variant in (WITHOUT, WITH, VARIANTS[2], FP32_MOMENTS):
        with bench.attempt(variant.name):
            times[variant.name] = measure(bench, variant, bandwidth)
        bench.place.tidy()
    if {WITHOUT.name, WITH.name} <= times.keys():
        judge(bench, times[WITHOUT.name], times[WITH.name])


def judge(bench: Bench, without: Times, with_it: Times) -> None:
    allowed = without.median + without.spread + with_it.spread
    bench.check_on_gpu(
        "the optimizer's step with the shim is not slower than without, but for the spread of both",
        with_it.median <= allowed,
        NO_TIMES,
        without=without.median,
        with_it=with_it.median,
        allowed=allowed,
    )


def measure(bench: Bench, variant: Variant, bandwidth: float) -> Times:
    """Time Megatron's whole step and FusedAdam's own; the latter also with little free memory."""
    place = bench.place
    repeat = DRY_REPEAT if bench.dry else REPEAT
    size = TINY if bench.dry else BILLION
    place.tidy()
    with shim(variant.on):
        made = trainer(place, size, variant.precision, optimizer=variant.fields)
        made.forward_backward(Batches(corpus()[0], size, place.device, seed=0).next())
        whole = timed(bench, made.update, repeat)
        adams = inner(made)
        require_gradients(adams)

        def adam_alone() -> None:
            for one in adams:
                one.step()

        alone = timed(bench, adam_alone, repeat)
        moved = bytes_to_move(made)
        floor = moved / bandwidth * 1e3
        at_rest = place.allocated()
        peak = place.peak_in(adam_alone)
        temporary = None if peak is None or at_rest is None else peak - at_rest
        tight = tightly(bench, adam_alone, temporary, repeat)
    bench.record(
        variant.name,
        f"step {whole.median:.2f} ms, FusedAdam alone {alone.median:.2f} ms (first "
        f"{alone.first:.1f}), {alone.median / floor:.1f} times what a copy of its "
        f"{moved / 1e9:.2f} GB takes; with little memory free {shown(tight)}",
        variant=variant.name,
        parameters=parameters_of(made),
        first_step_ms=whole.first,
        step_ms=list(whole.steps),
        step_median_ms=whole.median,
        adam_first_ms=alone.first,
        adam_ms=list(alone.steps),
        adam_median_ms=alone.median,
        bytes_to_move=moved,
        bytes_to_move_per_parameter=moved / parameters_of(made),
        floor_ms=floor,
        temporary_bytes=temporary,
        tight=tight,
    )
    return whole


def require_gradients(adams: list[Any]) -> None:
    """Check that the parameters have gradients: without gradients FusedAdam does nothing.

    Raises:
        RuntimeError: a parameter has no gradient after Megatron's step.
    """
    for adam in adams:
        name = "decoupled_grad" if adam.use_decoupled_grad else "grad"
        for group in adam.param_groups:
            if any(getattr(param, name, None) is None for param in group["params"]):
                raise RuntimeError(f"a parameter has no {name} after Megatron's step")


def timed(bench: Bench, function: Any, repeat: int) -> Times:
    """Time the first call, and ``repeat`` calls after some warm-up calls."""
    warm = DRY_WARM if bench.dry else WARM
    first, *others = bench.place.milliseconds(function, 1 + warm + repeat)
    return Times(first, tuple(others[warm:]))


def bytes_to_move(made: Any) -> int:
    """Minimum number of bytes that one step of Adam reads and writes.

    A step reads gradients, reads and writes masters and moments, and writes parameters. With
    remainders a step also reads the parameters, which are the upper halves of the masters.
    """
    import precision_shim

    (part,) = precision_shim.audit([made.model], made.optimizer).parts
    held = {name: one.bytes for name, one in part.components.items()}
    remainders = "int16" in part.components["master"].dtypes
    states = held["master"] + held["exp_avg"] + held["exp_avg_sq"]
    return int(held["grad_buckets"] + 2 * states + held["params"] * (2 if remainders else 1))


def tightly(
    bench: Bench, function: Any, temporary: int | None, repeat: int
) -> dict[str, Any] | None:
    """Time a step with only slightly more free memory than its temporary tensors need."""
    place = bench.place
    free = place.free()
    size = 0
    if free is not None and temporary is not None:
        # Another 256 MiB stay free for the driver and NCCL.
        size = free - int(temporary * TIGHT) - (1 << 28)
        if size <= 0:
            return None
    before = place.allocator()
    try:
        filler = torch.empty(size, dtype=torch.uint8, device=place.device)
        taken = timed(bench, function, repeat)
        del filler
    except torch.OutOfMemoryError as error:
        return {"error": str(error)[:500]}
    after = place.allocator()
    counted = None
    if before is not None and after is not None:
        counted = {key: after[key] - before[key] for key in after}
    return {
        "first_ms": taken.first,
        "ms": list(taken.steps),
        "median_ms": taken.median,
        "allocator": counted,
    }


def shown(tight: dict[str, Any] | None) -> str:
    """The result of the case with little free memory, as text."""
    if tight is None:
        return "not measured"
    if "error" in tight:
        return "out of memory"
    counted = tight["allocator"]
    calls = "" if counted is None else f", {counted['num_device_alloc']} calls of the driver"
    return f"{tight['median_ms']:.2f} ms{calls}"
