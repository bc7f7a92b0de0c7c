"""Count the optimizer steps that were skipped because of an overflow."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import LossScaleError
from ..precision.scaler_record import MAX_SKIPS

__all__ = ["MAX_SKIPS", "SkipCounter"]


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

    def note(self, skipped: bool, scale: float) -> None:
        """Count one step.

        Args:
            skipped: whether the step was skipped because its gradients were non-finite.
            scale: the loss scale of the step.

        Raises:
            LossScaleError: this is the ``limit``-th consecutive skip.
        """
        self.steps += 1
        if not skipped:
            self.in_row = 0
            return
        self.skipped += 1
        self.in_row += 1
        if self.in_row >= self.limit:
            raise LossScaleError(
                f"fp16 loss scaling: {self.in_row} optimizer steps in a row had non-finite "
                f"gradients and were skipped, up to step {self.steps} at loss scale {scale:g}. A "
                "lower scale does not help: look for inf or NaN in the loss, the data or the "
                "parameters, lower the learning rate, or train in bfloat16."
            )
