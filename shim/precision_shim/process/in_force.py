"""Is a feature in force for a framework? It is asked here alone.

Worker, doctor, plan and checkpoint doctor differ in how they know what was refused: the worker's
engine has refused it, the others read in the source what it would refuse (``Foreseen``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..reporting.record import SeamStatus
from .settings import Settings

__all__ = ["asked_for", "in_force", "refused_groups"]


def asked_for(settings: Settings, framework: str) -> bool:
    """Whether the shim is asked to patch a framework at all."""
    return settings.frameworks is None or framework in settings.frameworks


def in_force(
    settings: Settings,
    framework: str,
    feature: str,
    group: str,
    refused: Callable[[str, str, str], bool],
) -> bool:
    """Whether a feature is in force for a framework, as far as one group of seams goes.

    Args:
        settings: what is asked for, where the shim is on.
        framework: whose seams.
        feature: the feature.
        group: of the seams, as the adapter declares it: patched whole or not at all.
        refused: tells of framework, feature and group whether that group is refused.
    """
    return (
        asked_for(settings, framework)
        and feature in settings.features
        and not refused(framework, feature, group)
    )


def refused_groups(seams: Iterable[SeamStatus]) -> frozenset[tuple[str, str]]:
    """Feature and group of the seams that cannot be patched.

    A seam that its adapter declares as a refusal is none of them: it says no where it is used.
    """
    return frozenset(
        (one.feature, one.group) for one in seams if one.state == "refused" and not one.refusal
    )
