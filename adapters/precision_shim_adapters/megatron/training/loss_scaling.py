"""Check that a loss is scaled once, because Megatron always divides fp16 gradients by the scale.

A trainer scales with ``grad_scale_func``, ``scale_loss``, or ``get_loss_scale()``, which the other
two also call. An unscaled loss makes the gradients too small, one scaled twice too large; the
reported loss shows no sign of it. Delete this module when ``prepare_grads`` checks this.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from precision_shim.adapting import Call, current_settings, seam, warn
from precision_shim.errors import InconsistentPrecisionError

from ..policy.requested import ON_SCALING
from .build import megatron_label

_OPTIMIZER = "megatron.core.optimizer.optimizer"
_WAYS = "grad_scale_func of the model's config, scale_loss() nor get_loss_scale()"

_asked: weakref.WeakSet[Any] = weakref.WeakSet()
"""Optimizers whose loss scale was read (``note_asked``) since their last step."""


@seam(
    f"{_OPTIMIZER}:MixedPrecisionOptimizer.get_loss_scale",
    why="every way to scale a loss asks here",
    delete_when="Megatron's prepare_grads knows whether the loss was scaled",
    **ON_SCALING,
)
def note_asked(call: Call) -> Any:
    """Record that an optimizer's loss scale was read."""
    _asked.add(call.instance)
    return call.proceed()


def tell_unscaled(optimizers: Iterable[Any]) -> None:
    """Warn if no optimizer's loss scale was read since the last step."""
    from megatron.core import parallel_state

    asked = [optimizer for optimizer in optimizers if optimizer in _asked]
    _asked.difference_update(asked)
    # Only the last stage of a pipeline has a loss. Without Megatron's parallel groups the stage is
    # unknown.
    if asked or not (
        parallel_state.model_parallel_is_initialized() and parallel_state.is_pipeline_last_stage()
    ):
        return
    warn(
        f"{megatron_label()}: the loss was not scaled in this step: neither {_WAYS} was used, and "
        "the gradients are divided by the loss scale all the same: small ones are lost, and the "
        "reported norm is too small. Set the model config's grad_scale_func to the optimizer's "
        "scale_loss, or train in bfloat16."
    )


@seam(
    f"{_OPTIMIZER}:MegatronOptimizer.scale_loss",
    why="has the loss and its history in hand",
    delete_when="Megatron refuses a loss that is scaled already",
    relies_on=("get_loss_scale",),
    **ON_SCALING,
)
def refuse_scaled_twice(call: Call, loss: Any) -> Any:
    """Warn, or raise an error in strict mode, if the trainer has already scaled a loss.

    Raises:
        InconsistentPrecisionError: in strict mode, for a loss that was already scaled.
    """
    if _is_scaled(loss, call.instance.get_loss_scale()):
        message = (
            f"{megatron_label()}: the loss is scaled twice: it was multiplied with "
            "get_loss_scale() before scale_loss() (which grad_scale_func calls), and the gradients "
            "are divided by the scale once. Leave one of the two out."
        )
        if current_settings().strict:
            raise InconsistentPrecisionError(message)
        warn(message)
    return call.proceed()


def _is_scaled(loss: Any, scale: torch.Tensor) -> bool:
    """Whether one of the last operations on a loss multiplied the loss by the scale's tensor."""
    node = getattr(loss, "grad_fn", None)
    for _ in range(8):  # mean, weighting and cast are among the last 8 operations
        if node is None:
            return False
        if node.name().startswith("MulBackward"):
            factors = (getattr(node, name, None) for name in ("_saved_self", "_saved_other"))
            if any(
                factor is not None and factor.data_ptr() == scale.data_ptr() for factor in factors
            ):
                return True
        node = next((function for function, _ in node.next_functions if function is not None), None)
    return False
