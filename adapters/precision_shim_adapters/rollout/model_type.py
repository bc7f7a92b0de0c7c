"""Which kind of model a local directory holds."""

from __future__ import annotations

import json
from pathlib import Path


def model_type(path: str) -> str:
    """The ``model_type`` in the ``config.json`` of a local model, such as ``"gemma2"``.

    Nothing is fetched: the name of a model on a hub gives an empty string, as does a directory
    without a readable ``config.json``.

    Args:
        path: what the framework's config has as the model's path.
    """
    try:
        text = Path(path, "config.json").read_text(encoding="utf-8")
        read = json.loads(text)
    except (OSError, ValueError):
        return ""
    found = read.get("model_type") if isinstance(read, dict) else None
    return found if isinstance(found, str) else ""
