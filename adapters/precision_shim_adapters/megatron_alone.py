"""Adapter for any Megatron-core trainer that has no adapter; users ask for it as ``megatron``.

The seams for the audit, dtype names and fp16 are in Megatron's own classes. This adapter reads no
trainer's config, so it cannot tell what a user wrote from a default: it adds no low-precision
states, and a skipped step returns what Megatron returns. Where another adapter builds the model,
this adapter's own seams do nothing.

Delete when: see the backend's modules.
"""

from __future__ import annotations

from precision_shim.adapting import Adapter, collect

from . import megatron
from .frameworks import ANY_MEGATRON
from .megatron.acting import alone

ADAPTER = Adapter.of(
    ANY_MEGATRON,
    seams=collect(*megatron.SEAMS, alone),
    paths={**megatron.PATHS, megatron.GROUP: "any job"},
)
