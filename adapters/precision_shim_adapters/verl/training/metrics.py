"""Add to verl's metrics the loss scale and skipped steps of fp16, and the updates lost to rounding.

The seams in this module apply to every engine of verl. The legacy workers of 0.7.1 have their own
dicts of metrics; the seams on the workers' steps add the values to these dicts.
"""

from __future__ import annotations

from typing import Any

from precision_shim.adapting import Call, seam
from precision_shim.auditing import meters

from ... import megatron
from ...torch_fp16 import FEATURE
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
    """The loss scaler's metrics of an engine; empty if the loss is not scaled."""
    training = training_of(engine)
    return {
        **megatron.metrics(getattr(engine, "optimizer", None)),
        **(training.metrics() if training is not None else {}),
    }


@seam(feature=FEATURE, delete_when=_SCALE, **_OUTPUT)
def report(call: Call) -> Any:
    """Add the loss scaler's metrics next to the grad norm, after each batch of a training worker.

    The shim adds the scaler's metrics only after the batch, because during a batch verl gathers all
    metrics over the data-parallel ranks. Gathering turns a number into a list, and
    ``train_mini_batch`` fails on a list.
    """
    result = call.proceed()
    _add(result, of_engine(call.instance.engine))
    return result


@seam(feature="audit", delete_when=_LOST, **_OUTPUT)
def report_lost_updates(call: Call) -> Any:
    """Add the shares of updates lost to rounding, if ``PRECISION_SHIM_WATCH_UPDATES`` is set."""
    result = call.proceed()
    _add(result, meters.metrics(getattr(call.instance.engine, "optimizer", None)))
    return result


def _add(result: Any, figures: dict[str, float]) -> None:
    import verl.utils.tensordict_utils as tu

    metrics = tu.get(result, "metrics") if figures else {}
    if "grad_norm" in metrics:  # only a training step has ``grad_norm``
        tu.assign_non_tensor(result, metrics={**metrics, **figures})


@seam(feature=FEATURE, delete_when=_SCALE, **_STEP)
def report_step(call: Call) -> Any:
    """Add the loss scaler's metrics to the result of a Tinker client's step."""
    result = call.proceed()
    if "grad_norm" in result:
        result.update(of_engine(call.instance.engine))
    return result


@seam(feature="audit", delete_when=_LOST, **_STEP)
def report_lost_updates_of_step(call: Call) -> Any:
    """Add the shares of updates lost to rounding to the result of a Tinker client's step."""
    result = call.proceed()
    if "grad_norm" in result:
        result.update(meters.metrics(getattr(call.instance.engine, "optimizer", None)))
    return result
