"""Counting the steps that an overflow skipped."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import LossScaleError
from ..precision.scaler_record import MAX_SKIPS

__all__ = ["MAX_SKIPS", "SkipCounter"]


@dataclass
class SkipCounter:
    """How many optimizer steps were tried and how many of them an overflow skipped.

    Attributes:
        limit: this many skips in a row are an error.
        steps: optimizer steps tried, skipped ones included.
        skipped: steps that were skipped.
        in_row: skips since the last step that was taken.
    """

    limit: int = MAX_SKIPS
    steps: int = 0
    skipped: int = 0
    in_row: int = 0

    def note(self, skipped: bool, scale: float) -> None:
        """Count one step.

        Args:
            skipped: whether its gradients were non-finite.
            scale: the loss scale that the step was made with.

        Raises:
            LossScaleError: it is the ``limit``-th skip in a row.
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
