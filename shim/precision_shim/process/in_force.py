"""Decide whether a feature is in force for a framework; no other module decides this.

In a worker, the shim has recorded which groups of seams it could not patch. The commands doctor,
plan and checkpoint predict from source which groups of seams cannot be patched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .framework import Adapter
from .registry import by_name
from .settings import Settings


def asked_for(settings: Settings, framework: str) -> bool:
    """Whether the settings ask the shim to patch a framework."""
    if settings.frameworks is None:
        return framework not in by_name()
    return framework in settings.frameworks


def offered(every: Mapping[str, Adapter], settings: Settings | None) -> dict[str, Adapter]:
    """Return the frameworks to report; a ``by_name`` framework only if ``settings`` names it."""
    return {
        name: entry
        for name, entry in every.items()
        if not entry.by_name or (settings is not None and asked_for(settings, name))
    }


def in_force(
    settings: Settings,
    framework: str,
    feature: str,
    group: str,
    refused: Callable[[str, str, str], bool],
) -> bool:
    """Whether a feature is in force for a framework, within one group of seams.

    ``settings`` are those of a process in which the shim is on. ``refused`` is a function of
    framework, feature and group that returns whether the group is refused.
    """
    return (
        asked_for(settings, framework)
        and feature in settings.features
        and not refused(framework, feature, group)
    )
