"""The engines of a job and their LM heads: what an adapter may import to describe them."""

from __future__ import annotations

from ..precision import formats
from ..precision.agreement import AUTO, ENGINE_NAMES, FP8, Engine, Gate, Wire, compare, judge_wires
from ..precision.formats import Format
from ..precision.lm_head import SETTING, Head

__all__ = ["AUTO", "ENGINE_NAMES", "FP8", "SETTING", "Engine", "Format", "Gate", "Head", "Wire"]
__all__ += ["compare", "formats", "judge_wires"]
