"""verl's metrics: in fp16 the loss scale and the skipped steps, and the share of lost updates.

Whichever engine trains. 0.7.1's legacy workers have dicts of their own; theirs are filled beside
their steps.
"""

from __future__ import annotations

from typing import Any

from precision_shim.adapting import Call, seam
from precision_shim.updates import meters

from .. import megatron
from ..fp16 import FEATURE
from .fsdp import training_of

_SCALE = "verl reports the loss scale"
_LOST = "verl says which of its updates are lost to rounding"
_OUTPUT: dict[str, Any] = {
    "target": "verl.workers.engine_workers:TrainingWorker._postprocess_output",
    "group": "metrics",
    "why": "where verl puts the grad norm, after the metrics of all ranks are gathered",
    "relies_on": ("grad_norm", "engine"),
    "optional": True,
}
_STEP = {
    **_OUTPUT,
    "target": "verl.workers.engine_workers_tinker:TinkerTrainingWorker.optimizer_step",
    "group": "tinker metrics",
    "why": "steps outside train_batch and has a dict of metrics of its own",
}


def of_engine(engine: Any) -> dict[str, float]:
    """Megatron's counts or FSDP's scaler; empty for an engine that has neither."""
    training = training_of(engine)
    return {
        **megatron.metrics(getattr(engine, "optimizer", None)),
        **(training.metrics() if training is not None else {}),
    }


@seam(feature=FEATURE, delete_when=_SCALE, **_OUTPUT)
def report(call: Call) -> Any:
    """Put the figures beside the grad norm, after each batch of a training worker.

    Not earlier: what is among the metrics before is gathered over the data-parallel ranks, and a
    number then becomes a list, over which ``train_mini_batch`` breaks.
    """
    result = call.proceed()
    _add(result, of_engine(call.instance.engine))
    return result


@seam(feature="audit", delete_when=_LOST, **_OUTPUT)
def report_lost_updates(call: Call) -> Any:
    """Put the shares of lost updates there, where ``PRECISION_SHIM_WATCH_UPDATES`` is set."""
    result = call.proceed()
    _add(result, meters.metrics(getattr(call.instance.engine, "optimizer", None)))
    return result


def _add(result: Any, figures: dict[str, float]) -> None:
    import verl.utils.tensordict_utils as tu

    found = tu.get(result, "metrics") if figures else {}
    if "grad_norm" in found:  # a step was made: neither evaluation nor a backward pass alone
        tu.assign_non_tensor(result, metrics={**found, **figures})


@seam(feature=FEATURE, delete_when=_SCALE, **_STEP)
def report_step(call: Call) -> Any:
    """Put the figures into what a Tinker client's step returns."""
    found = call.proceed()
    if "grad_norm" in found:
        found.update(of_engine(call.instance.engine))
    return found


@seam(feature="audit", delete_when=_LOST, **_STEP)
def report_lost_updates_of_step(call: Call) -> Any:
    """Put the shares of lost updates into what a Tinker client's step returns."""
    found = call.proceed()
    if "grad_norm" in found:
        found.update(meters.metrics(getattr(call.instance.engine, "optimizer", None)))
    return found
