"""Turn an OmegaConf config into plain data, even if some references cannot be resolved.

A job's config may refer to variables or files that the machine running ``plan`` does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def plain(made: Any, only: Sequence[str] = (), unresolved: list[str] | None = None) -> Any:
    """A config as plain data; ``???``, and a reference that cannot be resolved, become ``None``.

    ``only`` are the sections to read (empty: all). Keys not resolved are appended to
    ``unresolved``.
    """
    from omegaconf import DictConfig, ListConfig

    if isinstance(made, ListConfig):
        places = [] if made._is_none() else range(len(made))
        return [_at(made, place, unresolved) for place in places]
    if not isinstance(made, DictConfig):
        return made
    if made._is_none() or made._is_missing():
        return None
    keys = [key for key in made if not only or key in only]
    return {str(key): _at(made, key, unresolved) for key in keys}


_NAMED = 5
"""Maximum number of keys that a note names."""


def tell_unresolved(keys: Sequence[str]) -> list[str]:
    """The plan's note about keys that could not be resolved; empty without such keys."""
    if not keys:
        return []
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    return [
        f"not resolved on this machine, and read as left out: {', '.join(keys[:_NAMED])}{more}. "
        "Plan where the variables of the job are set"
    ]


def _at(made: Any, key: Any, unresolved: list[str] | None) -> Any:
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    try:
        return plain(made[key], (), unresolved)
    except MissingMandatoryValue:
        return None
    except (OmegaConfBaseException, ValueError, TypeError, KeyError):
        if unresolved is not None:
            unresolved.append(str(made._get_full_key(key)))
        return None
