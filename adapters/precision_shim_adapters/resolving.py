"""Turn an OmegaConf config into plain data even where some references cannot be resolved.

A job's config may refer to variables or files that the machine running ``plan`` does not have.
"""

from __future__ import annotations

from typing import Any


def plain(made: Any) -> Any:
    """The config with its references resolved; a reference that cannot be resolved is ``None``."""
    from omegaconf import DictConfig, ListConfig

    if isinstance(made, ListConfig):
        return [] if made._is_none() else [_at(made, place) for place in range(len(made))]
    if not isinstance(made, DictConfig):
        return made
    if made._is_none() or made._is_missing():
        return None
    return {str(key): _at(made, key) for key in made}


def _at(made: Any, key: Any) -> Any:
    from omegaconf.errors import OmegaConfBaseException

    try:
        return plain(made[key])
    except (OmegaConfBaseException, ValueError, TypeError, KeyError):
        return None
