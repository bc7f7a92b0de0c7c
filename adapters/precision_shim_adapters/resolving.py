"""Turn an OmegaConf config into plain data, even if some references cannot be resolved.

A job's config may refer to variables or files that the machine running ``plan`` does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Keys = Mapping[str, Any]
"""Selects keys of a config: maps a key to a selection of its subkeys, or to ``True`` for all."""


def plain(made: Any, only: Keys | bool = True, unresolved: list[str] | None = None) -> Any:
    """A config as plain data; a reference that cannot be resolved becomes ``None``.

    Args:
        made: the config.
        only: the keys to read; resolving the whole config of a large job takes 50 ms.
        unresolved: a list, to which the keys that cannot be resolved are appended.
    """
    from omegaconf import DictConfig, ListConfig

    if isinstance(made, ListConfig):
        places = [] if made._is_none() else range(len(made))
        return [_at(made, place, True, unresolved) for place in places]
    if not isinstance(made, DictConfig):
        return made
    if made._is_none() or made._is_missing():
        return None
    if isinstance(only, Mapping):
        return {key: _at(made, key, only[key], unresolved) for key in only if key in made}
    return {str(key): _at(made, key, True, unresolved) for key in made}


def tell_unresolved(keys: Sequence[str]) -> list[str]:
    """The plan's note about keys that could not be resolved; empty if there are none."""
    if not keys:
        return []
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    return [
        f"not resolved on this machine, and read as left out: {', '.join(keys[:_NAMED])}{more}. "
        "Plan where the variables of the job are set"
    ]


_NAMED = 5
"""Maximum number of unresolved keys that the note names."""


def _at(made: Any, key: Any, only: Keys | bool, unresolved: list[str] | None) -> Any:
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    try:
        return plain(made[key], only, unresolved)
    except MissingMandatoryValue:
        return None
    except (OmegaConfBaseException, ValueError, TypeError, KeyError):
        if unresolved is not None:
            unresolved.append(str(made._get_full_key(key)))
        return None
