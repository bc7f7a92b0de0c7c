"""Adapter for Megatron-core trainers without their own adapter, enabled as ``megatron``.

The seams for the audit, for dtype names and for fp16 patch Megatron's own classes. This adapter
reads no trainer's config, so it cannot distinguish a user's values from defaults. The adapter
therefore adds no low-precision states, and does not change Megatron's return values of a skipped
step. The adapter's own seams do nothing while another adapter's framework builds a model.

Each module of the package ``megatron`` states its own condition for deletion.
"""

from __future__ import annotations

from precision_shim.adapting import collect

from .. import megatron
from .training import any_trainer

SEAMS = collect(*megatron.SEAMS, any_trainer)
