"""Code for fp16 with a torch optimizer, used by several adapters; one ``ScaledTraining`` per model.

An adapter's seams call the methods of the model's ``ScaledTraining``, which is loaded on first use:
a worker that trains on Megatron does not need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from precision_shim._lazy import lazily

from .settings import FEATURE, SETTINGS

if TYPE_CHECKING:
    from .training import ScaledTraining as ScaledTraining

__all__ = ["FEATURE", "SETTINGS", "ScaledTraining"]

__getattr__, __dir__ = lazily(__name__, {"ScaledTraining": ".training"})
