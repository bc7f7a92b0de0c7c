"""verl's metrics in fp16: the loss scale and the skipped steps, whichever engine trains.

0.7.1's legacy workers have dicts of their own; theirs are filled beside their steps.
"""

from __future__ import annotations

from typing import Any

from .. import loss_scaling, megatron_overflow


def of_engine(engine: Any) -> dict[str, float]:
    """Megatron's counts or FSDP's scaler; empty for an engine that has neither."""
    return {
        **megatron_overflow.metrics(getattr(engine, "optimizer", None)),
        **loss_scaling.metrics(getattr(engine, "scaler", None)),
    }


def report(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around ``TrainingWorker._postprocess_output``: beside the grad norm, which has it too.

    Not earlier: what is among the metrics before is gathered over the data-parallel ranks, and a
    number then becomes a list, over which ``train_mini_batch`` breaks.
    """
    import verl.utils.tensordict_utils as tu

    output = wrapped(*args, **kwargs)
    figures = of_engine(instance.engine)
    found = tu.get(output, "metrics") if figures else {}
    if "grad_norm" in found:  # a step was made: neither evaluation nor a backward pass alone
        tu.assign_non_tensor(output, metrics={**found, **figures})
    return output


def report_step(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around ``TinkerTrainingWorker.optimizer_step``, which steps outside ``train_batch``."""
    found = wrapped(*args, **kwargs)
    if "grad_norm" in found:
        found.update(of_engine(instance.engine))
    return found
