"""Predict from source code alone which of the shim's features would be in force in a process.

The source is the installed packages', or that of a release which is not installed
(``upstream.trees``).
"""

from __future__ import annotations

from typing import Any

from precision_shim.errors import PrecisionShimError, SeamError
from precision_shim.process.framework import Adapter
from precision_shim.process.in_force import asked_for, in_force
from precision_shim.process.registry import entries, load
from precision_shim.process.settings import PREFIX, Settings
from precision_shim.process.symbols import judge_version, missed, proofs
from precision_shim.process.versions import Versions, version_of
from precision_shim.reporting.record import FrameworkStatus, SeamStatus
from precision_shim.reporting.text import refusals
from precision_shim.seams import check

Groups = dict[str, frozenset[tuple[str, str]] | None]
"""Maps a framework to its refused features and groups; ``None``: all of them."""


class PredictedFeatures:
    """Predicts which features would be in force in processes with these settings of the shim.

    Predictions for settings that name the same features can share ``groups``, the refused groups of
    each framework: the sources are then read once.
    """

    def __init__(self, settings: Settings, groups: Groups | None = None) -> None:
        self.settings = settings
        self._groups: Groups = {} if groups is None else groups

    def in_force(self, framework: str, feature: str, group: str) -> bool:
        """Whether a feature would be in force within one group of seams."""
        return in_force(self.settings, framework, feature, group, self._is_refused)

    def _is_refused(self, framework: str, feature: str, group: str) -> bool:
        if framework not in self._groups:
            try:
                adapter = load(entries()[framework])
            except SeamError:
                self._groups[framework] = None  # all groups
            else:
                self._groups[framework] = frozenset(
                    (seam.feature, seam.group)
                    for seam in predict_seams(adapter, self.settings)
                    if seam.state == "refused" and not seam.refusal  # which only reports a reason
                )
        refused = self._groups[framework]
        return refused is None or (feature, group) in refused


def predict_seams(
    adapter: Adapter, settings: Settings, versions: Versions = version_of
) -> tuple[SeamStatus, ...]:
    """Predict the states of an adapter's seams from source code alone, without patching anything.

    ``versions`` returns the version of a distribution whose source is read.
    """
    had = missed(adapter, versions)
    return check(adapter, settings.features, settings, had, proofs()).predicted()


def predict_status(
    entry: Adapter, settings: Settings, versions: Versions = version_of
) -> tuple[FrameworkStatus, list[str]]:
    """Predict a framework's status from the current ``Source``; also return its problems.

    ``versions`` returns the version of a distribution whose source is read.
    """
    name, version = entry.framework, versions(entry.distribution, entry.packages)
    if not asked_for(settings, name):
        return FrameworkStatus(version, "off", reason="not among the frameworks asked for"), []
    if version is None:
        problem = f"{PREFIX}_FRAMEWORKS names {name}, which is not installed here"
        return FrameworkStatus(None, "absent"), [problem] if settings.frameworks else []
    try:
        adapter = load(entry)
        seams = predict_seams(adapter, settings, versions)
    except PrecisionShimError as error:
        return FrameworkStatus(version, "refused", reason=str(error)), [str(error)]
    tested, reason = judge_version(adapter, version, versions, closely=True)
    problems = refusals(f"{name} {version}", seams)
    order = ("refused", "pending", "native", "off") if problems else ("pending", "native", "off")
    states = {seam.state for seam in seams}
    state = next((state for state in order if state in states), "absent")
    return FrameworkStatus(version, state, seams, reason, tested), problems


def as_dict(status: FrameworkStatus) -> dict[str, Any]:
    """Return a framework's status as dicts, lists and strings, for JSON."""
    return {**status.to_dict(), "tested": status.tested}
