"""Part 7: an audit's time after a real step, and the audit's bytes beside the allocator's bytes."""

from __future__ import annotations

import statistics

from ..bench import Bench
from ..models import BILLION, TINY, parameters_of, shim, trainer
from ..place import NO_ALLOCATOR, NOT_COUNTED
from ..text import Batches, corpus
from .memory import SHARE

REPEAT, DRY_REPEAT = 10, 3


def run(bench: Bench) -> None:
    import precision_shim

    place = bench.place
    size = TINY if bench.dry else BILLION
    repeat = DRY_REPEAT if bench.dry else REPEAT
    place.tidy()
    before = place.allocated()
    with shim():
        made = trainer(place, size)
        batches = Batches(corpus()[0], size, place.device, seed=0)
        made.train_step(batches.next())
        tokens = batches.next()
        steps = place.milliseconds(lambda: made.train_step(tokens), repeat)
        at_rest = place.allocated()
        audits = place.milliseconds(
            lambda: precision_shim.audit([made.model], made.optimizer), repeat
        )
        with place.host_syncs() as syncs:
            audit = precision_shim.audit([made.model], made.optimizer)
        after = place.allocated()
    step, cost = statistics.median(steps), statistics.median(audits)
    held = None if at_rest is None or before is None else at_rest - before
    counted = audit.totals["allocated"]
    bench.record(
        "an audit after a step",
        f"{cost:.2f} ms beside a step of {step:.2f} ms; it counts {counted:,} bytes, torch's "
        f"allocator {'nothing here' if held is None else f'{held:,}'}",
        parameters=parameters_of(made),
        step_ms=steps,
        audit_ms=audits,
        host_syncs=syncs.count,
        audit_allocated=counted,
        allocated=held,
        audit=audit.to_dict(),
    )
    bench.check("the audit of a live step finds no problem", audit.ok)
    bench.check_on_gpu(
        "an audit never waits for the device", syncs.count == 0, NOT_COUNTED, found=syncs.count
    )
    bench.check_on_gpu("an audit leaves nothing on the device", after == at_rest, NO_ALLOCATOR)
    bench.check_on_gpu(
        f"the audit's bytes are the allocator's, but for {SHARE:.0%}",
        held is not None and abs(held - counted) <= SHARE * counted,
        NO_ALLOCATOR,
        allocated=held,
        audit=counted,
    )
