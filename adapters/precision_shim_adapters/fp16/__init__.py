"""The backend for fp16 with a torch optimizer: one object carries out a model's scaled training.

An adapter says where a framework makes its optimizer, its loss, its step and its checkpoints, and
what their results look like. At each of those places it calls a ``ScaledTraining``.
"""

from __future__ import annotations

from .settings import SETTINGS
from .training import FEATURE, ScaledTraining

__all__ = ["FEATURE", "SETTINGS", "ScaledTraining"]
