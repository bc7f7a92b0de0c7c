"""Code for fp16 with a torch optimizer, used by several adapters; one ``ScaledTraining`` per model.

An adapter's seams wrap the framework's functions that make the optimizer, compute the loss, step,
and write or read checkpoints. Each seam calls a method of the model's ``ScaledTraining``.
"""

from __future__ import annotations

from .settings import SETTINGS
from .training import FEATURE, ScaledTraining

__all__ = ["FEATURE", "SETTINGS", "ScaledTraining"]
