"""Any job on Megatron-core, without an adapter for its trainer; asked for by the name ``megatron``.

The audit, dtype names and fp16 are in Megatron's own classes. No trainer's config is read here, so
the shim cannot tell what a user wrote from a default: it adds no low-precision states, and a
skipped step returns what Megatron returns. Beside another adapter it does nothing of its own.

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
