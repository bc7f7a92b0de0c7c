"""The audit, sent weights and lost updates: what an adapter may import of them."""

from __future__ import annotations

from ..auditing import meters, weight_audit
from ..auditing.automatic import tell_without_effect, watch
from ..auditing.weight_audit import is_wanted, tell_asked

__all__ = ["is_wanted", "meters", "tell_asked", "tell_without_effect", "watch", "weight_audit"]
