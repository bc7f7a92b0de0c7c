"""Find a model's directory on this machine; nothing is downloaded."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import PlanError

EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
"""Keys under which a Hugging Face config may have the number of routed experts."""


def directory_of(name: object) -> Path:
    """Return a model's directory, on disk or in the Hugging Face cache, without a download.

    Raises:
        PlanError: the model is neither on disk nor in the cache.
    """
    text = os.path.expanduser(str(name))
    path = Path(text)
    if os.path.isfile(path):
        path = path.parent
    if os.path.isfile(path / "config.json"):
        return path
    cached = _find_in_cache(text)
    if cached is not None:
        return cached
    raise PlanError(
        f"the model {str(name)!r} is not here: expected a directory with config.json, or a name "
        "in the cache of the Hugging Face hub. Fetch its config.json (hf download NAME "
        "config.json), or name a directory with --model, or the size with --parameters "
        "N[,experts=M]."
    )


def _find_in_cache(name: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, "config.json")
    except Exception:  # huggingface_hub is missing, or the name is no repository's name
        return None
    return Path(cached).parent if isinstance(cached, str) else None
