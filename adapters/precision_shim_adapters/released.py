"""Check that a framework's files are unedited: values in edited files may be the user's own."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
from collections.abc import Iterable
from pathlib import Path


def are_released(distribution: str, paths: Iterable[Path]) -> bool:
    """Whether each file belongs to a distribution and equals the file in the distribution's wheel.

    The result is false for a source checkout, because a user may have edited its files.

    Args:
        distribution: the framework's name on PyPI.
        paths: the files.
    """
    wanted = [path.resolve() for path in paths]
    names = {path.name for path in wanted}
    try:
        files = importlib.metadata.files(distribution) or ()
        recorded = {
            Path(str(file.locate())).resolve(): file.hash.value
            for file in files
            if file.name in names and file.hash is not None
        }
        return all(recorded.get(path) == _digest(path) for path in wanted)
    except (OSError, importlib.metadata.PackageNotFoundError):
        return False


def _digest(path: Path) -> str:
    """A file's SHA-256 digest, encoded as in a wheel's ``RECORD``."""
    digest = hashlib.sha256(path.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
