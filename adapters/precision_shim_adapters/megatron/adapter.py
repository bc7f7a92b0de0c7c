"""Adapter for Megatron-core trainers without their own adapter, enabled as ``megatron``.

It patches Megatron's classes, and reads no trainer's config, so it cannot distinguish a user's
values from defaults: it adds no low-precision states, and does not change the return values of a
skipped step. Its own seams do nothing while another adapter's framework builds a model. Each module
of the package ``megatron`` states its own condition for deletion.
"""

from __future__ import annotations

from precision_shim.adapting import collect

from .. import megatron
from .training import any_trainer

SEAMS = collect(*megatron.SEAMS, any_trainer)
