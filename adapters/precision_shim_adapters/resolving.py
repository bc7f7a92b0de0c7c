"""An OmegaConf config as plain data, read where not all of it can be resolved.

A job's config may ask for variables or files that the machine that plans it lacks.
"""

from __future__ import annotations

from typing import Any


def plain(made: Any) -> Any:
    """The config with its references resolved; what cannot be is ``None``."""
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
