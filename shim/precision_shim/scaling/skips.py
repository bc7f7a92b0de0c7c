"""Count steps that an overflow skipped, and make the states that such a step does not make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from ..errors import LossScaleError
from ..reporting.journal import log
from .record import MAX_SKIPS


@dataclass
class SkipCounter:
    """Counts optimizer steps, and the steps that were skipped because of an overflow.

    Attributes:
        limit: number of consecutive skips that raises an error.
        steps: number of optimizer steps, including skipped steps.
        skipped: number of steps that were skipped.
        in_row: number of skips since the last step that was not skipped.
    """

    limit: int = MAX_SKIPS
    steps: int = 0
    skipped: int = 0
    in_row: int = 0

    def note(self, skipped: bool, scale: float, after: float | torch.Tensor) -> None:
        """Count one step, which was skipped or not, at a loss scale; ``after`` is the next scale.

        Of the skips, the first, tenth, hundredth and so on are printed on rank 0.

        Raises:
            LossScaleError: this is the ``limit``-th consecutive skip.
        """
        self.steps += 1
        if not skipped:
            self.in_row = 0
            return
        self.skipped += 1
        self.in_row += 1
        if self.skipped == 10 ** (len(str(self.skipped)) - 1):
            log(
                f"fp16 loss scaling: optimizer step {self.steps} was skipped, because a gradient "
                f"was not finite: loss scale {scale:g}, then {float(after):g}; normal in fp16 "
                f"(skipped so far: {self.skipped})"
            )
        if self.in_row >= self.limit:
            raise LossScaleError(
                f"fp16 loss scaling: {self.in_row} optimizer steps in a row had non-finite "
                f"gradients and were skipped, up to step {self.steps} at loss scale {scale:g}. A "
                "lower scale does not help: look for inf or NaN in the loss, the data or the "
                "parameters, lower the learning rate, or train in bfloat16."
            )


def states_of_no_step(optimizer: Optimizer, initialize: Callable[[], Any]) -> Any:
    """Make the states of an optimizer without states with ``initialize``, with a step count of 0.

    To make missing states, torch's distributed checkpoint and torchtitan step on zero gradients;
    the step counts are then 1. If parameters have gradients, torch and torchtitan make no states.
    Without this function, a checkpoint that is saved after only skipped steps would not resume
    exactly, or would not load.
    """
    parameters = [param for group in optimizer.param_groups for param in group["params"]]
    gradients = [param.grad for param in parameters]
    for param in parameters:
        param.grad = None
    try:
        result = initialize()
    finally:
        for param, gradient in zip(parameters, gradients, strict=True):
            param.grad = gradient
    for state in optimizer.state.values():
        count = state.get("step")
        if isinstance(count, torch.Tensor):
            count.zero_()
        elif count is not None:
            state["step"] = 0
    return result
