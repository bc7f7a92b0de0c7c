"""SkyRL: audit the weights that the policy sends to the inference engines.

SkyRL 0.4 and later iterates over a weight source once in each weight sync; before 0.4 an extractor
yields weights in chunks. For fp8, a weight source wraps another one, and SkyRL sends only the outer
source's weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from precision_shim.adapting import Call, seam
from precision_shim.adapting.audit import weight_audit
from precision_shim.adapting.dtypes import DTYPES

from ..rollout.dtypes import PUBLISHER, READ, base_dtypes
from ..training.megatron import TRAIN, WORKER

_AUDIT: dict[str, Any] = {"feature": "audit", "group": "weights audit"}
_SOURCES = f"{TRAIN}.weight_sync.sources"
_WHY = "the stream of weights, as it is sent"
_DELETE = "SkyRL says which precision its inference engines have"

_wrapped: WeakSet[Any] = WeakSet()
"""Weight sources that another weight source wraps."""

_stored: WeakKeyDictionary[Any, torch.dtype] = WeakKeyDictionary()
"""Maps a weight source to its base checkpoint's dtype, to which the delta sync rounds weights."""


@seam(
    f"{_SOURCES}:SerializedFp8WeightSource.__init__",
    only_if=(f"{_SOURCES}:SerializedFp8WeightSource",),
    why="wraps the source of the weights that are quantised",
    delete_when=_DELETE,
    optional=True,
    **_AUDIT,
)
def wrap(call: Call, source: Any) -> None:
    """Record that another weight source wraps ``source``, so that the audit ignores ``source``."""
    _wrapped.add(source)
    call.proceed()


@seam(
    at=[
        {"target": f"{source}.__iter__", "only_if": (source,)}
        for kind in ("Fsdp", "Megatron", "SerializedFp8", "LoraAdapter")
        for source in (f"{_SOURCES}:{kind}WeightSource",)
    ],
    why=_WHY,
    delete_when=_DELETE,
    optional=True,
    **_AUDIT,
)
def look_at_source(call: Call) -> Iterator[Any]:
    """Yield a weight source's weights unchanged, and pass each weight to the audit."""
    weights, source = call.proceed(), call.instance
    if source not in _wrapped:
        weights = weight_audit.observe(weights, "skyrl", "policy", then=_stored.get(source))
    yield from weights


@seam(
    why="rounds the weights to the dtype of the base checkpoint, after it has taken them",
    relies_on=READ,
    **_AUDIT,
    **PUBLISHER,
)
def know_base(call: Call, source: Any) -> Any:
    """Record the base checkpoint's dtype, on the rank that sends the weights."""
    stored = base_dtypes(call.instance)
    if len(stored) == 1:
        _stored[source] = DTYPES[next(iter(stored))]
    return call.proceed()


@seam(
    at=[
        {"target": f"{extractor}.extract_weights", "only_if": (extractor,)}
        for extractor in (
            f"{TRAIN}.workers.fsdp.fsdp_worker:FSDPWeightExtractor",
            f"{WORKER}:MegatronWeightExtractor",
        )
    ],
    why=_WHY,
    delete_when="SkyRL 0.4 is the oldest in use",
    optional=True,
    **_AUDIT,
)
def look_at_chunks(call: Call) -> Iterator[Any]:
    """Pass to the audit the chunks of weights that SkyRL before 0.4 sends."""
    yield from weight_audit.observe(call.proceed(), "skyrl", "policy", pairs=_pairs)


def _pairs(chunk: Any) -> Iterator[tuple[str, Any]]:
    yield from zip(chunk.names, chunk.tensors, strict=True)
