"""The backend for a job's two sides: the engines' dtype names, their agreement, and reports.

An adapter reads its framework's config into one ``Engine`` for the trainer and one for each other
engine, and calls ``settle`` in the driver, before the framework asks for GPUs. ``engine_name``
turns what a user wrote into the engine's dtype name. Nothing here changes vLLM or SGLang.
"""

from __future__ import annotations

from precision_shim.precision.agreement import AUTO, CANONICAL, FP8, Engine, resolve_auto

from .meter import tell_meter
from .model_type import OF_HEADER, checkpoint_dtype, model_type, stored_dtypes
from .names import engine_name
from .planning import problems_of
from .telling import FEATURE, follows, settle
from .wire import Wire, tell_of_wires, wire_problems

__all__ = [
    "AUTO",
    "CANONICAL",
    "FEATURE",
    "FP8",
    "OF_HEADER",
    "Engine",
    "Wire",
    "checkpoint_dtype",
    "engine_name",
    "follows",
    "model_type",
    "problems_of",
    "resolve_auto",
    "settle",
    "stored_dtypes",
    "tell_meter",
    "tell_of_wires",
    "wire_problems",
]
