"""Add to verl's metrics the loss scale and skipped steps of fp16, and the updates lost to rounding.

The seams apply to every engine; 0.7.1's legacy workers have their own dicts of metrics.
"""

from __future__ import annotations

from typing import Any

from precision_shim.adapting import Call, seam
from precision_shim.adapting.audit import meters

from ... import megatron
from ...torch_fp16 import FEATURE
from .fsdp import training_of

_PLACES: list[dict[str, Any]] = [
    {
        "target": "verl.workers.engine_workers:TrainingWorker._postprocess_output",
        "group": "metrics",
        "why": "where verl puts the grad norm, after the metrics of all ranks are gathered",
    },
    {
        "target": "verl.workers.engine_workers_tinker:TinkerTrainingWorker.optimizer_step",
        "group": "tinker metrics",
        "why": "steps outside train_batch and has a dict of metrics of its own",
    },
]
_WRITTEN: dict[str, Any] = {"relies_on": ("grad_norm", "engine"), "optional": True}


def of_engine(engine: Any) -> dict[str, float]:
    """The loss scaler's metrics of an engine; empty if the loss is not scaled."""
    training = training_of(engine)
    if training is not None:
        return training.metrics()
    return megatron.metrics(getattr(engine, "optimizer", None))


@seam(feature=FEATURE, at=_PLACES, delete_when="verl reports the loss scale", **_WRITTEN)
def report(call: Call) -> Any:
    """Add the loss scaler's metrics next to the grad norm, after each batch or Tinker step.

    During a batch verl gathers all metrics over the ranks, which turns a number into a list, and
    ``train_mini_batch`` fails on a list.
    """
    result = call.proceed()
    _add(result, of_engine(call.instance.engine))
    return result


@seam(
    feature="audit",
    at=_PLACES,
    delete_when="verl says which of its updates are lost to rounding",
    **_WRITTEN,
)
def report_lost_updates(call: Call) -> Any:
    """Add the shares of updates lost to rounding, if ``PRECISION_SHIM_WATCH_UPDATES`` is set."""
    result = call.proceed()
    _add(result, meters.metrics(getattr(call.instance.engine, "optimizer", None)))
    return result


def _add(result: Any, figures: dict[str, float]) -> None:
    """Add figures to the dict of a Tinker step, or to the metrics in a batch's output."""
    import verl.utils.tensordict_utils as tu

    if not figures:
        return
    metrics = result if isinstance(result, dict) else tu.get(result, "metrics")
    # only a training step has ``grad_norm``
    if "grad_norm" in metrics and metrics is result:
        result.update(figures)
    elif "grad_norm" in metrics:
        tu.assign_non_tensor(result, metrics={**metrics, **figures})
