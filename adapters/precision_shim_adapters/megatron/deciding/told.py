"""Store which problems ``optimizer.check`` has reported, so that the audit omits them."""

from __future__ import annotations

import weakref
from typing import Any

_told: dict[int, tuple[weakref.ref[Any], set[str]]] = {}
"""Maps the ``id`` of an OptimizerConfig, which has no hash, to the codes of its known problems."""


def note_told(config: Any, *codes: str) -> None:
    """Store problems of which the user has already been warned, so that the audit omits them.

    Args:
        config: the OptimizerConfig; kept by a weak reference only.
        codes: the codes with which the audit would report the problems.
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


def find_noted_codes(config: Any) -> frozenset[str]:
    """The codes that ``note_told`` stored for an OptimizerConfig."""
    reference, known = _told.get(id(config), (None, set()))
    return frozenset(known) if reference is not None and reference() is config else frozenset()
