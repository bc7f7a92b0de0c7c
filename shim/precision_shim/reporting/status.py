"""``Status``, the record that ``status()`` returns; it loads the module ``text`` to be shown."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .record import Record


@dataclass(frozen=True)
class Status(Record):
    """A snapshot of the shim in this process.

    ``str()`` fits on a screen: with one framework in use, at most 40 lines of 80 columns.
    ``details()`` contains everything.

    Attributes:
        enabled: whether the shim is installed in this process.
        features: names of the features in force.
        settings: the values of all settings and of ``strict``, by their lower-case names.
        frameworks: the frameworks' states, by name.
        decisions: the shim's choices, oldest first.
        notes: further messages to the user, such as the reason why nothing was installed.
        given: names of the settings that the user set; all other settings have their defaults.
        audit: the latest automatic audit of each optimizer.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return the snapshot as a dict for JSON: of dicts, lists, strings and numbers."""
        return {
            "enabled": self.enabled,
            "features": list(self.features),
            "settings": dict(self.settings),
            "frameworks": {name: found.to_dict() for name, found in self.frameworks.items()},
            "decisions": [asdict(decision) for decision in self.decisions],
            "notes": list(self.notes),
            "audit": [audit.to_dict() for audit in self.audit],
        }

    def details(self) -> str:
        """Return the whole record as a table: every setting, every seam in full, every decision."""
        from .text import table

        return table(self)

    def __str__(self) -> str:
        from .text import screen

        return screen(self)
