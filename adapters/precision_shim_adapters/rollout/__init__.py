"""The backend for a job's two sides: names of the engines' dtypes, agreement, and what is said.

An adapter reads its framework's config into one ``Engine`` for the trainer and one for each other
engine, and calls ``settle`` in the driver, before the framework asks for GPUs. ``engine_name``
reads the names. Nothing here acts within vLLM or SGLang.
"""

from __future__ import annotations

from precision_shim.precision.agreement import AUTO, FP8, Engine

from .model_type import model_type
from .names import engine_name
from .planning import problems_of
from .telling import FEATURE, follows, settle

__all__ = [
    "AUTO",
    "FEATURE",
    "FP8",
    "Engine",
    "engine_name",
    "follows",
    "model_type",
    "problems_of",
    "settle",
]
