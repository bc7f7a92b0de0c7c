"""Compare the dtypes in which a job's trainer and its other engines compute; report differences.

An adapter reads its framework's config into an ``Engine`` object for the trainer and for each other
engine. In the driver, before the framework requests GPUs, the adapter calls ``settle``.
``engine_name`` converts a user's dtype to the engine's dtype name. The shim does not patch vLLM or
SGLang.
"""

from __future__ import annotations

from precision_shim.precision.agreement import AUTO, CANONICAL, FP8, Engine
from precision_shim.precision.lm_head import Head

from .lm_head import (
    FIELD,
    NOT_IN_FORCE,
    SETTING,
    IsInForce,
    compute_in_fp32,
    is_marked,
    names_head,
    of_rollout,
    of_trainer,
    problems_of_heads,
    report_heads,
    unchanged_heads,
)
from .model_files import OF_HEADER, checkpoint_dtype, model_type, resolve_by_model, stored_dtypes
from .names import engine_name, with_rounded, write_key
from .report import FEATURE, JobEngines, follows, problems_of, report_engines
from .weight_sync import Wire, tell_of_wires, wire_problems

__all__ = [
    "AUTO",
    "CANONICAL",
    "FEATURE",
    "FIELD",
    "FP8",
    "NOT_IN_FORCE",
    "OF_HEADER",
    "SETTING",
    "Engine",
    "Head",
    "IsInForce",
    "JobEngines",
    "Wire",
    "checkpoint_dtype",
    "compute_in_fp32",
    "engine_name",
    "follows",
    "is_marked",
    "model_type",
    "names_head",
    "of_rollout",
    "of_trainer",
    "problems_of",
    "problems_of_heads",
    "report_engines",
    "report_heads",
    "resolve_by_model",
    "stored_dtypes",
    "tell_of_wires",
    "unchanged_heads",
    "wire_problems",
    "with_rounded",
    "write_key",
]
