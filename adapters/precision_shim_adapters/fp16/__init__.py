"""The backend for fp16 with a torch optimizer: one ``ScaledTraining`` object per model.

An adapter has seams where a framework makes its optimizer, computes its loss, steps, and writes or
reads its checkpoints. Each seam calls a method of the model's ``ScaledTraining``.
"""

from __future__ import annotations

from .settings import SETTINGS
from .training import FEATURE, ScaledTraining

__all__ = ["FEATURE", "SETTINGS", "ScaledTraining"]
