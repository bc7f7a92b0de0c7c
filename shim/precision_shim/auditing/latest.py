"""The optimizers and models that are audited, with their latest audits, for ``status()``."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..precision.effect import Written
    from .record import Audit


@dataclass
class Watched:
    """An optimizer, or a frozen model, that is audited.

    Attributes:
        framework: the framework's name; empty for none.
        subject: name of the model, such as ``"actor"``.
        owner: the torch optimizer, or the frozen model; if it is garbage-collected, so is the
            audit. ``None`` keeps the audit.
        model: the model's modules.
        wrote: the dtypes that the user wrote for the model in the framework's config.
        fp32_key: see ``rules.find``.
        audit: the latest audit.
        not_written: why the latest audit was not written to a file; empty if it was.
    """

    framework: str
    subject: str
    owner: weakref.ref[Any] | None
    model: list[weakref.ref[Any]]
    wrote: tuple[Written, ...] = ()
    fp32_key: str = ""
    audit: Audit | None = None
    not_written: str = ""

    @property
    def exists(self) -> bool:
        """Whether the owner was not garbage-collected."""
        return self.owner is None or self.owner() is not None

    def modules(self) -> list[Any]:
        """Return the model's modules, except modules that were garbage-collected."""
        return [module for ref in self.model if (module := ref()) is not None]


_watched: list[Watched] = []
_undo: list[Callable[[], object]] = []
_names: Counter[str] = Counter()

rollouts: dict[str, tuple[str, str]] = {}
"""The dtype that the job's config sets for a framework's rollout, and the dtype's key."""
syncs: Counter[str] = Counter()
"""Number of the weight syncs of each framework so far."""


def add(watched: Watched) -> None:
    """Store an object, and forget the objects whose owners were garbage-collected."""
    _watched[:] = [each for each in _watched if each.exists]
    _watched.append(watched)


def of(owner: Any) -> Any:
    """The ``Watched`` of an optimizer, or ``None``."""
    return next((one for one in _watched if one.owner is not None and one.owner() is owner), None)


def written(owners: Iterable[Any]) -> tuple[Written, ...]:
    """Return the dtypes that the user wrote for the model of one of these optimizers."""
    found = (watched.wrote for owner in owners if (watched := of(owner)) is not None)
    return next(filter(None, found), ())


def fp32_keys() -> list[str]:
    """Return the ``fp32_key`` of each optimizer that still exists."""
    return [each.fp32_key for each in _watched if each.exists]


def name(stem: str) -> str:
    """Return a file name's stem, with a number appended if this process used the stem before."""
    _names[stem] += 1
    return stem if _names[stem] == 1 else f"{stem}-{_names[stem]}"


def named() -> bool:
    """Whether this process has named a file for an audit."""
    return bool(_names)


def problems() -> list[str]:
    """Return the distinct reasons why audits were not written to ``PRECISION_SHIM_AUDIT_DIR``."""
    return list(dict.fromkeys(each.not_written for each in _watched if each.not_written))


def model_of(framework: str, subject: str) -> list[Any]:
    """Return the modules of the model of this name that was audited last."""
    for each in reversed(_watched):
        if (each.framework, each.subject) == (framework, subject) and each.model:
            return each.modules()
    return []


def audits() -> list[Audit]:
    """Return the latest audit of each optimizer that still exists, the oldest first."""
    return [each.audit for each in _watched if each.exists and each.audit is not None]


def at_clear(undo: Callable[[], object]) -> None:
    """Register a function for the next ``uninstall()``, or the next ``install()`` that differs."""
    _undo.append(undo)


def clear() -> None:
    """Forget all audits and models, and call the functions registered with ``at_clear``."""
    for each in (_watched, _names, rollouts, syncs):
        each.clear()
    while _undo:
        _undo.pop()()
