"""All names that an adapter may import, such as ``seam``, ``Call``, ``Settings`` and ``decide``.

The names that need torch, or that few adapters need, are in the modules ``dtypes``, ``rollouts``,
``scaling`` and ``audit`` of this package; exceptions are in ``precision_shim.errors``.
An adapter converts a framework's objects for the shim's rule functions, and the results back; it
contains no rule on precision. CONTRIBUTING.md shows how to write one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..auditing.latest import at_clear as at_uninstall
from ..errors import PrecisionShimError, SettingsError, UnsupportedPrecisionError
from ..holding import holding
from ..precision.findings import Decision, Findings, Problem
from ..process import settings as _settings
from ..process.framework import Adapter, Checkpoints
from ..process.names import meant
from ..process.session import check_ranks, current_settings, in_force
from ..process.settings import FEATURES, Settings
from ..process.versions import version_of
from ..reporting import journal as _journal
from ..seams import (
    Call,
    NativeProbe,
    Seam,
    Symbol,
    around,
    collect,
    definition,
    is_there,
    look,
    seam,
)

__all__ = [
    "FEATURES",
    "Adapter",
    "Call",
    "Checkpoints",
    "Decision",
    "Findings",
    "NativeProbe",
    "Problem",
    "Seam",
    "Settings",
    "Symbol",
    "around",
    "at_uninstall",
    "check_ranks",
    "collect",
    "current_settings",
    "decide",
    "definition",
    "holding",
    "in_force",
    "is_there",
    "look",
    "meant",
    "parse_settings",
    "report",
    "seam",
    "version_of",
    "versioned",
    "warn",
]


def decide(framework: str, subject: str, feature: str, chosen: str, because: str) -> None:
    """Record a choice of the shim for ``status()``, and print it to stderr once, on rank 0."""
    _journal.record(Decision(framework, subject, feature, chosen, because))


def report(
    findings: Findings, raises: type[PrecisionShimError] | None = UnsupportedPrecisionError
) -> None:
    """Record a rule's decisions, and warn of its problems; notes are for the tools.

    Args:
        findings: what the rule found.
        raises: the error for the problems in strict mode; ``None`` in a worker whose other ranks
            would wait for the rank that raised.

    Raises:
        PrecisionShimError: of the class ``raises``.
    """
    for decision in findings.decisions:
        _journal.record(decision)
    problems = [str(one) for one in findings.problems]
    if problems and raises is not None and current_settings().strict:
        raise raises("\n".join(problems))
    for message in problems:
        _journal.warn(message, stacklevel=3)


def versioned(distribution: str, package: str = "", called: str = "") -> str:
    """Return a framework's name and version as messages show them, such as ``"verl 0.9.1"``.

    ``package`` and ``called`` (the name in messages) default to ``distribution``.
    """
    version = version_of(distribution, (package or distribution.replace("-", "_"),))
    return f"{called or distribution} {version or ''}".rstrip()


def warn(message: str) -> None:
    """Warn the user once per process (category ``PrecisionShimWarning``)."""
    _journal.warn(message, stacklevel=3)


def parse_settings(
    values: Mapping[str, object], names: Iterable[str], where: str
) -> dict[str, Any]:
    """Parse the shim's settings that a user wrote into a framework's config.

    Args:
        values: the settings, keyed by their names in ``install(settings=...)``. ``None`` values are
            ignored.
        names: the names of the allowed settings.
        where: the path of the settings in the config, for messages.

    Raises:
        SettingsError: a setting is not allowed, or its value is invalid.
    """
    allowed = tuple(names)
    if not isinstance(values, Mapping):
        raise SettingsError(
            f"{where}={values!r}: expected a section with keys; allowed: {', '.join(allowed)}. "
            "Write the keys in it, or leave it out."
        )
    parsed: dict[str, Any] = {}
    for name, value in values.items():
        if name not in allowed:
            raise SettingsError(
                f"{where}: unknown key {name!r}; allowed: {', '.join(allowed)}. Correct the key "
                "or leave it out."
            )
        if value is not None:
            try:
                parsed[name] = _settings.TABLE[name].parse(name, value)
            except SettingsError as error:
                raise SettingsError(f"{where}.{name}: {error}") from None
    return parsed
