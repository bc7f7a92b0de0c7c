"""Which of the audit's problems the pair check has told already: one fault, one warning."""

from __future__ import annotations

import weakref
from typing import Any

_told: dict[int, tuple[weakref.ref[Any], set[str]]] = {}
"""OptimizerConfigs, by ``id`` since they have no hash, to codes: written by ``note_told``."""


def note_told(config: Any, *codes: str) -> None:
    """Remember that the user was told what the audit would find.

    Args:
        config: the OptimizerConfig; the optimizer keeps it, and nothing here does.
        codes: of the audit's problems.
    """
    key = id(config)
    reference, known = _told.get(key, (None, set()))
    if reference is None or reference() is not config:
        known = set()

        def forget(gone: weakref.ref[Any]) -> None:
            if key in _told and _told[key][0] is gone:
                del _told[key]

        _told[key] = weakref.ref(config, forget), known
    known.update(codes)


def told_about(config: Any) -> frozenset[str]:
    """The codes that were noted for an OptimizerConfig."""
    reference, known = _told.get(id(config), (None, set()))
    return frozenset(known) if reference is not None and reference() is config else frozenset()
