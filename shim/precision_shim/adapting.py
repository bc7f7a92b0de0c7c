"""What an adapter may use: records to declare, settings to read, decisions to keep.

Adapters translate between a framework's shapes and the rules' (``precision_shim.rules``); they
hold no rule themselves. See CONTRIBUTING.md for how to write one.
"""

from __future__ import annotations

from . import _journal
from ._registry import MEGATRON_EFFECTS
from ._session import current_settings, in_force, version_of
from ._settings import Settings
from ._status import Decision
from .seams import Adapter, NativeProbe, Seam, Symbol, look

__all__ = [
    "MEGATRON_EFFECTS",
    "Adapter",
    "Decision",
    "NativeProbe",
    "Seam",
    "Settings",
    "Symbol",
    "current_settings",
    "decide",
    "in_force",
    "look",
    "version_of",
    "warn",
]


def decide(framework: str, subject: str, feature: str, chosen: str, because: str) -> None:
    """Keep a decision for ``status()`` and say it once, on rank 0."""
    _journal.record(Decision(framework, subject, feature, chosen, because))


def warn(message: str) -> None:
    """Warn the user once per process (category ``PrecisionShimWarning``)."""
    _journal.warn(message, stacklevel=3)
