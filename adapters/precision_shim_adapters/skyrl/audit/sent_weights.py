"""SkyRL: audit the weights that the policy sends to the inference engines.

SkyRL 0.4 and later makes a weight source, an iterable of the live model's weights. In each weight
sync, vLLM's sender iterates over the weight source once. SkyRL before 0.4 makes an extractor that
yields weights in chunks. For fp8, a weight source wraps another weight source, and SkyRL sends only
the outer source's weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from precision_shim.adapting import Call, seam
from precision_shim.auditing import weight_audit
from precision_shim.precision.dtypes import CANONICAL

from ..rollout.dtypes import dtypes_of_locations
from ..training.megatron import TRAIN

FEATURE, GROUP = "audit", "weights audit"
_SOURCES = "skyrl.backends.skyrl_train.weight_sync.sources"
_WORKERS = f"{TRAIN}.workers"
_WHY = "the stream of weights, as it is sent"
_DELETE = "SkyRL says which precision its inference engines have"

_DELTA = "skyrl.backends.skyrl_train.weight_sync.delta.checkpoint"

_wrapped: WeakSet[Any] = WeakSet()
"""Weight sources that another weight source wraps."""

_stored: WeakKeyDictionary[Any, torch.dtype] = WeakKeyDictionary()
"""Maps a weight source to its base checkpoint's dtype, to which the delta sync rounds weights."""


@seam(
    f"{_SOURCES}:SerializedFp8WeightSource.__init__",
    FEATURE,
    group=GROUP,
    only_if=(f"{_SOURCES}:SerializedFp8WeightSource",),
    why="wraps the source of the weights that are quantised",
    delete_when=_DELETE,
    optional=True,
)
def wrap(call: Call, source: Any) -> None:
    """Record that another weight source wraps ``source``, so that the audit ignores ``source``."""
    _wrapped.add(source)
    call.proceed()


@seam(
    feature=FEATURE,
    at=[
        {
            "target": f"{_SOURCES}:{name}.__iter__",
            "only_if": (f"{_SOURCES}:{name}",),
        }
        for name in (
            "FsdpWeightSource",
            "MegatronWeightSource",
            "SerializedFp8WeightSource",
            "LoraAdapterWeightSource",
        )
    ],
    group=GROUP,
    why=_WHY,
    delete_when=_DELETE,
    optional=True,
)
def look_at_source(call: Call) -> Iterator[Any]:
    """Yield a weight source's weights unchanged, and pass each weight to the audit."""
    weights, source = call.proceed(), call.instance
    if source not in _wrapped:
        weights = weight_audit.observe(weights, "skyrl", "policy", then=_stored.get(source))
    yield from weights


@seam(
    f"{_DELTA}:DeltaCheckpointPublisher.create_delta_files",
    FEATURE,
    group=GROUP,
    only_if=(f"{_DELTA}:DeltaCheckpointPublisher",),
    why="rounds the weights to the dtype of the base checkpoint, after it has taken them",
    delete_when="SkyRL's delta sync sends model_dtype",
    relies_on=("target_dtype", "_base_location"),
    optional=True,
)
def know_base(call: Call, source: Any) -> Any:
    """Record the base checkpoint's dtype, on the rank that sends the weights."""
    publisher = call.instance
    if weight_audit.is_wanted() and publisher._current_rank() == 0:
        stored = dtypes_of_locations(publisher._ensure_base_locations())
        if len(stored) == 1:
            _stored[source] = CANONICAL[next(iter(stored))]
    return call.proceed()


@seam(
    feature=FEATURE,
    at=[
        {
            "target": f"{_WORKERS}.{module}:{name}.extract_weights",
            "only_if": (f"{_WORKERS}.{module}:{name}",),
        }
        for module, name in (
            ("fsdp.fsdp_worker", "FSDPWeightExtractor"),
            ("megatron.megatron_worker", "MegatronWeightExtractor"),
        )
    ],
    group=GROUP,
    why=_WHY,
    delete_when="SkyRL 0.4 is the oldest in use",
    optional=True,
)
def look_at_chunks(call: Call) -> Iterator[Any]:
    """Pass to the audit the chunks of weights that SkyRL before 0.4 sends."""
    yield from weight_audit.observe(call.proceed(), "skyrl", "policy", pairs=_pairs)


def _pairs(chunk: Any) -> Iterator[tuple[str, Any]]:
    yield from zip(chunk.names, chunk.tensors, strict=True)
