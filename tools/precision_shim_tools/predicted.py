"""Predict from source code alone which of the shim's features would be in force in a process."""

from __future__ import annotations

from precision_shim.errors import SeamError
from precision_shim.process.framework import Adapter
from precision_shim.process.in_force import in_force
from precision_shim.process.registry import entries, load
from precision_shim.process.settings import Settings
from precision_shim.process.symbols import missed
from precision_shim.process.versions import Versions, version_of
from precision_shim.reporting.record import SeamStatus
from precision_shim.seams import check

__all__ = ["PredictedFeatures", "predict_seams"]


class PredictedFeatures:
    """Predicts which features would be in force in processes with these settings of the shim."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._groups: dict[str, frozenset[tuple[str, str]] | None] = {}

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
    return check(adapter, settings.features, settings, missed(adapter, versions)).predicted()
