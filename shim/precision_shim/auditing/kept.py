"""Store each optimizer's latest audit for ``status()``, and whether it was written to a file.

The module also stores weak references to the audited models, which ``sending`` reads.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .record import Audit

_audits: dict[int, Audit] = {}
_owners: dict[int, weakref.ref[Any]] = {}
"""Weak reference to each audited optimizer, or to a frozen model that has no optimizer."""

_not_written: dict[int, str] = {}
_undo: list[Callable[[], object]] = []
_names: Counter[str] = Counter()
_models: dict[tuple[str, str], list[weakref.ref[Any]]] = {}
_numbers = itertools.count()


def number() -> int:
    """Return a new number that identifies an optimizer."""
    return next(_numbers)


def name(stem: str) -> str:
    """Return a file name's stem, with a number appended if this process used the stem before."""
    _names[stem] += 1
    return stem if _names[stem] == 1 else f"{stem}-{_names[stem]}"


def put(of: int, audit: Audit) -> None:
    """Store an optimizer's audit; it replaces the optimizer's previous audit."""
    _audits[of] = audit


def belongs(of: int, owner: weakref.ref[Any]) -> None:
    """Delete the audit with this number when its optimizer or frozen model is garbage-collected."""
    _owners[of] = owner


def of(number: int) -> Audit | None:
    """Return an optimizer's latest audit, or ``None``."""
    return _audits.get(number)


def written(of: int, problem: str = "") -> None:
    """Record that an optimizer's latest audit was written, or why writing it failed."""
    _not_written[of] = problem


def problems() -> list[str]:
    """Return the distinct reasons why audits were not written to ``PRECISION_SHIM_AUDIT_DIR``."""
    return list(dict.fromkeys(filter(None, _not_written.values())))


def put_model(framework: str, subject: str, model: Sequence[weakref.ref[Any]]) -> None:
    """Store weak references to a model's modules, in place of an older model of the same name."""
    if model:
        _models[framework, subject] = list(model)


def model_of(framework: str, subject: str) -> list[Any]:
    """Return the stored modules of a model, except modules that were garbage-collected."""
    return [
        optimizer
        for ref in _models.get((framework, subject), ())
        if (optimizer := ref()) is not None
    ]


def at_clear(undo: Callable[[], object]) -> None:
    """Register a function that ``clear`` calls."""
    _undo.append(undo)


def audits() -> list[Audit]:
    """Return the latest audit of each optimizer that still exists, the oldest first."""
    for number, owner in list(_owners.items()):
        if owner() is None:
            _owners.pop(number, None)
            _audits.pop(number, None)
    return list(_audits.values())


def clear() -> None:
    """Delete all audits and references, and call the functions registered with ``at_clear``."""
    while _undo:
        _undo.pop()()
    _audits.clear()
    _owners.clear()
    _not_written.clear()
    _names.clear()
    _models.clear()
