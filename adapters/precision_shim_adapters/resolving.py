"""Turn an OmegaConf config into plain data even where some references cannot be resolved.

A job's config may refer to variables or files that the machine running ``plan`` does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Keys = Mapping[str, Any]
"""A selection: key to a selection within it, or ``True`` for all of it."""


def plain(made: Any, only: Keys | bool = True) -> Any:
    """The config with its references resolved; a reference that cannot be resolved is ``None``.

    Args:
        made: the config.
        only: what is read of it; resolving a whole config of a large job takes 50 ms.
    """
    from omegaconf import DictConfig, ListConfig

    if isinstance(made, ListConfig):
        return [] if made._is_none() else [_at(made, place) for place in range(len(made))]
    if not isinstance(made, DictConfig):
        return made
    if made._is_none() or made._is_missing():
        return None
    if isinstance(only, Mapping):
        return {key: _at(made, key, only[key]) for key in only if key in made}
    return {str(key): _at(made, key) for key in made}


def _at(made: Any, key: Any, only: Keys | bool = True) -> Any:
    from omegaconf.errors import OmegaConfBaseException

    try:
        return plain(made[key], only)
    except (OmegaConfBaseException, ValueError, TypeError, KeyError):
        return None
