"""The process's audits, for ``status()``: each optimizer's newest, and whether it was written.

Also the models whose optimizers are audited, for the audit of the weights that are sent.
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
_not_written: dict[int, str] = {}
_undo: list[Callable[[], object]] = []
_names: Counter[str] = Counter()
_models: dict[tuple[str, str], list[weakref.ref[Any]]] = {}
_numbers = itertools.count()


def number() -> int:
    """A number that no optimizer has yet."""
    return next(_numbers)


def name(stem: str) -> str:
    """Make a file's stem that no other optimizer of this process has."""
    _names[stem] += 1
    return stem if _names[stem] == 1 else f"{stem}-{_names[stem]}"


def put(of: int, audit: Audit) -> None:
    """Keep an optimizer's audit in place of its previous one."""
    _audits[of] = audit


def of(number: int) -> Audit | None:
    """An optimizer's newest audit, if there is one."""
    return _audits.get(number)


def written(of: int, problem: str = "") -> None:
    """Note that an optimizer's newest audit was written, or why it was not."""
    _not_written[of] = problem


def problems() -> list[str]:
    """Why audits could not be written to ``PRECISION_SHIM_AUDIT_DIR``, each reason once."""
    return list(dict.fromkeys(filter(None, _not_written.values())))


def put_model(framework: str, subject: str, model: Sequence[weakref.ref[Any]]) -> None:
    """Keep the modules of a model, in place of an older model of that name."""
    if model:
        _models[framework, subject] = list(model)


def model_of(framework: str, subject: str) -> list[Any]:
    """The modules of a model that still live."""
    return [one for ref in _models.get((framework, subject), ()) if (one := ref()) is not None]


def at_clear(undo: Callable[[], object]) -> None:
    """Have ``clear`` call a function."""
    _undo.append(undo)


def audits() -> list[Audit]:
    """The audits, in the order of their optimizers."""
    return list(_audits.values())


def clear() -> None:
    """Forget all audits, and stop watching the optimizers."""
    while _undo:
        _undo.pop()()
    _audits.clear()
    _not_written.clear()
    _names.clear()
    _models.clear()
