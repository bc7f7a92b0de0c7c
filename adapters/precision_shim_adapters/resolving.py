"""Turn an OmegaConf config into plain data, even if some references cannot be resolved.

A job's config may refer to variables or files that the machine running ``plan`` does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Keys = Mapping[str, Any]
"""Selects keys of a config: maps a key to a selection of its subkeys, or to ``True`` for all."""


def plain(
    made: Any,
    only: Keys | bool = True,
    unresolved: list[str] | None = None,
) -> Any:
    """A config as plain data; ``???``, and a reference that cannot be resolved, become ``None``.

    Args:
        made: the config.
        only: the keys to read; resolving the whole config of a large job takes 50 ms.
        unresolved: a list; ``plain`` appends the keys that cannot be resolved.
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
        there = [key for key in only if key in made]
        return {key: _at(made, key, only[key], unresolved) for key in there}
    return {str(key): _at(made, key, True, unresolved) for key in made}


def tell_unresolved(keys: Sequence[str]) -> list[str]:
    """The plan's note about keys that could not be resolved; empty without such keys."""
    if not keys:
        return []
    return [
        f"not resolved on this machine, and read as left out: {_names(keys)}. "
        "Plan where the variables of the job are set"
    ]


def _names(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    return f"{', '.join(keys[:_NAMED])}{more}"


_NAMED = 5
"""Maximum number of keys that a note names."""


def _at(
    made: Any,
    key: Any,
    only: Keys | bool,
    unresolved: list[str] | None,
) -> Any:
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    try:
        return plain(made[key], only, unresolved)
    except MissingMandatoryValue:
        return None
    except (OmegaConfBaseException, ValueError, TypeError, KeyError):
        if unresolved is not None:
            unresolved.append(str(made._get_full_key(key)))
        return None
