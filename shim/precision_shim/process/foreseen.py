"""Which of the shim's features would act in a process started here, told from source alone."""

from __future__ import annotations

from ..errors import SeamError
from . import session as _session
from .in_force import in_force, refused_groups
from .registry import entries
from .settings import Settings

__all__ = ["Foreseen"]


class Foreseen:
    """Tells what would be in force for the frameworks that are installed here.

    Args:
        settings: the settings of the process, in which the shim is on.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._groups: dict[str, frozenset[tuple[str, str]] | None] = {}

    def in_force(self, framework: str, feature: str, group: str) -> bool:
        """Whether a feature would be in force within one group of seams."""
        return in_force(self.settings, framework, feature, group, self._is_refused)

    def _is_refused(self, framework: str, feature: str, group: str) -> bool:
        if framework not in self._groups:
            self._groups[framework] = self._refused_of(framework)
        refused = self._groups[framework]
        return refused is None or (feature, group) in refused

    def _refused_of(self, framework: str) -> frozenset[tuple[str, str]] | None:
        """The refused groups; ``None`` for all, where the adapter cannot be loaded."""
        try:
            adapter = entries()[framework].load()
        except SeamError:
            return None
        return refused_groups(_session.preview(adapter, self.settings))
