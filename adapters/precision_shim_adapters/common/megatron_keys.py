"""The optimizers' keys in Megatron's distributed checkpoints, read without torch or Megatron."""

from __future__ import annotations

import re

DTYPES_IN_KEY = re.compile(r"dtype_\((torch\.\w+), (torch\.\w+)\)")
"""Matches the dtypes in an optimizer's key: the parameters' dtype, then the bucket's dtype."""

_MASTER = re.compile(r"\.param$|\.fp32_param\.")

KEEPING = ("dp_reshardable", "fully_sharded_model_space")
"""Sharding types of checkpoints that store each optimizer state in its own dtype."""

KEYED = ("dp_reshardable", "dp_zero_gather_scatter")
"""Sharding types of checkpoints whose keys contain the bucket's dtype."""

OFFLOADED = "offload_fraction"
"""Key of the states' fraction on the host, in groups of Megatron's optimizer for CPU offload."""


def is_optimizers(key: str) -> bool:
    """Whether a key of a sharded state belongs to an optimizer."""
    return key.startswith("optimizer.") or ".optimizer." in key


def is_master(key: str) -> bool:
    """Whether an optimizer's key names master weights or their remainders, which share a key."""
    return _MASTER.search(key) is not None
