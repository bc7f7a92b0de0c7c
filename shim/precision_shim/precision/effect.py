"""Find the dtypes that a user wrote in a framework's config, and that have no effect.

Adapters list the keys that the user wrote (``Written``). The plan and the audit, which is also the
worker's check, list the dtypes in force; ``without_effect`` compares the two lists.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .dtypes import any_dtype, name_of
from .findings import Findings, Problem

CODE = "no-effect"
"""Code of the problem in a plan and in an audit."""

COMPUTES, REDUCES = "computes", "reduces"
"""What a key may set besides a component of the audit: the dtype in which layers compute, and the
dtype in which FSDP reduces gradients."""

_FOUND = {
    "params": "the parameters are {}",
    "grad_buckets": "the gradient buckets are {}",
    "master": "the masters are {}",
    COMPUTES: "the layers compute in {}",
    REDUCES: "FSDP reduces the gradients in {}",
}


@dataclass(frozen=True)
class Written:
    """A dtype key that the user wrote; a framework's default is not written.

    Attributes:
        key: the key in the config.
        value: its value.
        sets: what gets the dtype: a component of the audit, ``COMPUTES`` or ``REDUCES``; empty if
            nothing reads the key.
        needs: what to write so that the dtype takes effect; empty if nothing does it.
        means: the dtype's name, if ``value`` is a flag.
        read: whether the framework reads the key; if not, ``sets`` is what the key seems to mean.
        fixed: name of the dtype that is in force in any case, if the key seems to mean that dtype.
    """

    key: str
    value: object
    sets: str = ""
    needs: str = ""
    means: str = ""
    read: bool = True
    fixed: str = ""

    def __str__(self) -> str:
        return f"{self.key}={self.value}"

    @property
    def dtype(self) -> str:
        """Canonical name of the dtype; empty if the value names none."""
        found = any_dtype(self.means or str(self.value))
        return name_of(found) if found is not None else ""

    def in_force(self, held: Mapping[str, Collection[str]]) -> list[str]:
        """Names of the dtypes in force for what the key sets; ``held``: see ``without_effect``."""
        found = (self.fixed,) if self.fixed else held.get(self.sets, ())
        # A key for the parameters may be meant for those beneath LoRA adapters.
        found = (*found, *held.get("frozen", ())) if self.sets == "params" else found
        return ["fp32" if name == "int16" else name for name in dict.fromkeys(found)]


_PRECISION = re.compile(r"dtype|precision|quant|(?<![a-z])(?:bf|fp|float)\d")


def values_of(config: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key of a config, with those of its sections, and the key's value."""
    if dataclasses.is_dataclass(config):
        config = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for name, value in config.items() if isinstance(config, Mapping) else ():
        yield f"{place}{name}", value
        yield from values_of(value, f"{place}{name}.")


def names_precision(key: str, value: object) -> bool:
    """Whether a key seems to set a precision, by its name or by a dtype's name as its value."""
    if not value or isinstance(value, Mapping):
        return False
    named = isinstance(value, str) and not value.isdigit() and any_dtype(value) is not None
    return named or _PRECISION.search(key) is not None


def without_effect(
    written: Collection[Written],
    held: Mapping[str, Collection[str]],
    subject: str = "",
    where: str = "",
) -> Findings:
    """Find the keys whose dtype is not in force; a key that nothing reads may be only a note.

    ``held`` maps what a key may set to the names of the dtypes in force; what it lacks is unknown
    or does not exist, and its keys are not judged. ``subject`` is the model's name, ``where``
    framework and version, for messages.
    """
    problems, notes = [], []
    for one in written:
        found = one.in_force(held)
        if one.dtype in found and not one.read:
            notes.append(f"{one}: nothing reads this key; {one.dtype} is in force without it")
        unknown = one.sets and (not found or (one.read and not one.dtype))
        if unknown or one.dtype in found:
            continue
        message = _FOUND.get(one.sets, f"{one.sets} is {{}}").format("+".join(found))
        remedy = f"Write {one.needs}, or leave {one.key} out." if one.needs else ""
        if not (one.sets and one.read):
            message = "nothing reads this key"
        elif winners := [w for w in written if w.sets == one.sets and w.dtype in found]:
            message += f", as {' and '.join(map(str, winners))} says"
            remedy = f"Leave {one.key} or {' or '.join(other.key for other in winners)} out."
        message = f"{where and f'{where}: '}{one} has no effect: {message}"
        problems.append(Problem(CODE, subject, one.key, message, remedy or f"Leave {one.key} out."))
    return Findings(problems=tuple(problems), notes=tuple(notes))
