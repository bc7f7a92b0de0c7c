"""The description of the package: README without what only a checkout has.

An index of packages shows README by itself, so links to other files of the repository would lead
nowhere: their words stay, the links go, and pictures with their captions. Whoever reads it there
installs from there, not from a clone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE = re.compile(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n(?:.+\n)*\n*", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)[^)]*\)")


class Description(MetadataHookInterface):
    """Makes the description when a package is built."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Put it into the package's metadata."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = _LINK.sub(r"\1", _PICTURE.sub("", text))
        text = text.replace("a clone (not yet on PyPI), ", "")
        text = text.replace("/path/to/precision_shim", "precision-shim")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
