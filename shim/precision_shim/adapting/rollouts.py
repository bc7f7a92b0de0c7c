"""The engines of a job and their LM heads: what an adapter may import to describe them."""

from __future__ import annotations

from ..precision.agreement import AUTO, ENGINE_NAMES, FP8, Engine, Gate, Wire, compare, judge_wires
from ..precision.formats import (
    BLOCKS,
    CHANNEL,
    MX,
    NVFP4,
    NVFP4_WEIGHTS,
    ROWS,
    TENSOR,
    TOKEN,
    UNKNOWN,
    Format,
    Quantized,
    forward_of,
    in_e4m3,
    of_modelopt,
    parts_of,
)
from ..precision.lm_head import SETTING, Head

__all__ = [
    "AUTO",
    "ENGINE_NAMES",
    "FP8",
    "SETTING",
    "Engine",
    "Format",
    "Gate",
    "Head",
    "Wire",
    "compare",
]
__all__ += ["judge_wires"]
__all__ += ["BLOCKS", "CHANNEL", "MX", "NVFP4", "NVFP4_WEIGHTS", "ROWS", "TENSOR", "TOKEN"]
__all__ += ["UNKNOWN", "Quantized", "forward_of", "in_e4m3", "of_modelopt", "parts_of"]
