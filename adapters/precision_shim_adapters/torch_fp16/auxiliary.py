"""Scale the MoE auxiliary losses of nemo_automodel in the same way as the loss."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import torch

from .training import ScaledTraining

_MODULE = "nemo_automodel.components.moe.megatron.moe_utils"


@contextlib.contextmanager
def auxiliary_losses(training: ScaledTraining) -> Iterator[Callable[[torch.Tensor], None]]:
    """Multiply the gradients of nemo_automodel's MoE auxiliary losses by the loss scale.

    nemo_automodel's ``MoEAuxLossAutoScaler`` multiplies these gradients by its attribute
    ``main_loss_backward_scale``, which a framework may set before each batch. The yielded function
    multiplies the attribute by the loss scale; call it with each loss, before its backward pass.
    """
    holder = getattr(sys.modules.get(_MODULE), "MoEAuxLossAutoScaler", None)
    if holder is None:
        yield lambda loss: None
        return
    before = own = holder.main_loss_backward_scale
    ours: torch.Tensor | None = None

    def follow(loss: torch.Tensor) -> None:
        nonlocal own, ours
        if holder.main_loss_backward_scale is not ours:  # the framework set a new scale
            own = holder.main_loss_backward_scale
        unit = torch.ones((), device=loss.device)
        ours = training.scaler.scale(unit) * (1.0 if own is None else own)
        holder.main_loss_backward_scale = ours

    try:
        yield follow
    finally:
        holder.main_loss_backward_scale = before
