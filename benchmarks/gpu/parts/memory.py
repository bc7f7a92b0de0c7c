"""Part 1: memory of GPTs with 1.3 and 7 billion parameters, with and without the shim.

``torch.cuda`` measures resident and peak bytes, and the audit counts the bytes of each component.
The two measurements are independent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..bench import Bench
from ..models import BILLION, SEVEN, TINY, Size, parameters_of, shim, summary, trainer
from ..place import NO_ALLOCATOR
from ..text import Batches, corpus

STEPS = 2
SHARE = 0.01
"""Allowed relative difference of the allocator's bytes from the audit's: the allocator rounds
blocks up, and Megatron keeps a buffer for attention scores."""
ROOM = 1.15
"""The model with 7 billion parameters is tried if the GPU has this many times its bytes free."""
SEVEN_S = 40.0
"""Minimum time for the model with 7 billion parameters, in seconds; a guess."""


@dataclass(frozen=True)
class Variant:
    """One way to train a model.

    Attributes:
        name: the variant's name in the results.
        expected: expected bytes per parameter.
        on: whether the shim is on.
        precision: the model's dtype.
        fields: the user's fields of Megatron's OptimizerConfig.
        promised: whether ``expected`` is checked as a claim, or only reported.
    """

    name: str
    expected: float
    on: bool = True
    precision: str = "bfloat16"
    fields: dict[str, Any] = field(default_factory=dict)
    promised: bool = True


WITHOUT = Variant("without the shim", 18.0, on=False)
WITH = Variant("with the shim", 10.0)
VARIANTS = (
    WITHOUT,
    WITH,
    Variant("with, whole masters", 12.0, fields={"store_param_remainders": False}),
    Variant(
        "with, fp8 moments",
        8.0,
        fields={
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": "fp8",
            "exp_avg_sq_dtype": "fp8",
        },
        promised=False,
    ),
    Variant("with, fp16", 18.0, precision="float16"),
)


def run(bench: Bench) -> None:
    for variant in VARIANTS:
        measure(bench, variant, TINY if bench.dry else BILLION, "1.3 billion")
    for variant in (WITH, WITHOUT):
        if fits(bench, variant):
            measure(bench, variant, TINY if bench.dry else SEVEN, "7 billion")


def fits(bench: Bench, variant: Variant) -> bool:
    """Whether the model with 7 billion parameters is tried; if not, record the reason."""
    what = f"7 billion, {variant.name}"
    free = bench.place.free()
    wanted = int(SEVEN.parameters * variant.expected * ROOM)
    if free is not None and free < wanted:
        bench.record(
            what,
            f"not tried: {gigabytes(wanted)} wanted, {gigabytes(free)} free",
            free_bytes=free,
            wanted_bytes=wanted,
        )
        return False
    if not bench.dry and bench.seconds_left() < SEVEN_S:
        left = bench.seconds_left()
        bench.record(what, f"not tried: {left:.0f} s were left, {SEVEN_S:.0f} wanted")
        return False
    return True


def measure(bench: Bench, variant: Variant, size: Size, name: str) -> None:
    """Train a model and measure its memory; running out of memory is a result, not an error."""
    what = f"{name}, {variant.name}"
    with bench.attempt(what):
        try:
            _measure(bench, variant, size, name)
        except torch.OutOfMemoryError as error:
            bench.record(what, "did not fit: out of memory", error=str(error)[:500])
    bench.place.tidy()


def _measure(bench: Bench, variant: Variant, size: Size, name: str) -> None:
    import precision_shim

    place = bench.place
    place.tidy()
    before = place.allocated()
    with shim(variant.on):
        made = trainer(place, size, variant.precision, optimizer=variant.fields)
        batches = Batches(corpus()[0], size, place.device, seed=0)
        peaks: dict[str, int | None] = {}
        for step in range(1, STEPS + 1):
            tokens = batches.next()
            peaks[f"forward and backward, step {step}"] = place.peak_in(
                lambda tokens=tokens: made.forward_backward(tokens)  # type: ignore[misc]
            )
            at_rest = place.allocated()
            peaks[f"optimizer, step {step}"] = place.peak_in(made.update)
        audit = precision_shim.audit([made.model], made.optimizer)
    after = place.allocated()
    count = parameters_of(made)

    def per_parameter(value: int | None, less: int | None = before) -> float | None:
        return None if value is None or less is None else (value - less) / count

    by_audit = summary(audit)
    together = sum(by_audit.values())
    resident = per_parameter(after)
    in_step = per_parameter(peaks[f"optimizer, step {STEPS}"])
    bench.record(
        f"{name}, {variant.name}",
        f"audit {together:.2f} B/param of {variant.expected:g} expected, "
        f"resident {shown(resident)}, peak in the optimizer's step {shown(in_step)}",
        variant=variant.name,
        size=name,
        parameters=count,
        expected=variant.expected,
        audit_per_parameter=by_audit,
        audit_together=together,
        audit_allocated=audit.totals["allocated"],
        resident_bytes=None if after is None or before is None else after - before,
        resident_per_parameter=resident,
        peak_bytes=peaks,
        peak_in_step_per_parameter=in_step,
        temporary_in_step_per_parameter=per_parameter(peaks[f"optimizer, step {STEPS}"], at_rest),
    )
    allocated = audit.totals["allocated"] / count
    checks(bench, variant, name, together=together, allocated=allocated, resident=resident)


def checks(
    bench: Bench,
    variant: Variant,
    name: str,
    *,
    together: float,
    allocated: float,
    resident: float | None,
) -> None:
    what = f"{name}, {variant.name}"
    says = f"{what}: the live tensors take {variant.expected:g} bytes per parameter"
    if variant.promised:
        bench.check(says, abs(together - variant.expected) < 0.005, found=together)
    else:
        bench.check(says, None, "nominal: measured, never promised", found=together)
    bench.check_on_gpu(
        f"{what}: torch.cuda's resident bytes are the audit's, but for {SHARE:.0%}",
        resident is not None and abs(resident - allocated) <= SHARE * allocated,
        NO_ALLOCATOR,
        resident=resident,
        audit=allocated,
    )


def shown(value: float | None) -> str:
    """A number of bytes per parameter, as text."""
    return "not measured" if value is None else f"{value:.2f}"


def gigabytes(count: int) -> str:
    """Bytes for people."""
    return f"{count / 1e9:.1f} GB"
