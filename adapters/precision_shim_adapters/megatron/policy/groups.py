"""Find the saved parameter group that each of Megatron's parameter groups had. Needs no torch.

A checkpoint stores a group's settings without its parameters. Megatron finds a group by a few of
these settings (``param_group_identifier_keys``); of several groups that are equal in these, it
takes the settings of the last for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Group = Mapping[str, Any]

RATES_SINCE = (0, 19)
"""The first megatron-core release that finds a group by its learning rates, too."""

_FLAGS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
_OVERRIDES = ("end_wd", "max_lr", "min_lr", "optimizer", "start_wd", "wd_mult")
_NOT_SETTINGS = ("params", "step")
_STEPPED = ("lr", "weight_decay")
"""Settings that the scheduler computes anew for each step, which do not identify a group."""


def identifiers(release: tuple[int, ...]) -> tuple[str, ...]:
    """Return a megatron-core release's ``param_group_identifier_keys``."""
    return _FLAGS if release < RATES_SINCE else (*_OVERRIDES, *_FLAGS[1:])


def named(group: Group, keys: Sequence[str]) -> tuple[str, ...]:
    """Return the settings by which a group is found, of which NeMo renames some."""
    return tuple(_text(group.get(key, group.get(f"pre_{key}"))) for key in keys)


def merged(saved: Sequence[Group], keys: Sequence[str]) -> list[str]:
    """Return the settings in which saved groups differ although Megatron takes them for one."""
    firsts: dict[tuple[str, ...], Group] = {}
    return sorted(
        {
            name
            for group in saved
            for name in map(str, group)
            if name not in (*_NOT_SETTINGS, *_STEPPED)
            and _text(group.get(name))
            != _text(firsts.setdefault(named(group, keys), group).get(name))
        }
    )


def restored(
    live: Sequence[Group], saved: Sequence[Group], keys: Sequence[str]
) -> list[dict[str, Any] | None]:
    """Return the saved settings of each live group; ``None`` for a group that was not saved.

    If Megatron takes no two saved groups for one, the result is empty.
    """
    differing = merged(saved, keys)
    known = {named(one, (*keys, *differing)): one for one in saved}
    found = [known.get(named(group, (*keys, *differing))) for group in live if differing]
    return [
        None if one is None else {k: v for k, v in one.items() if k not in _NOT_SETTINGS}
        for one in found
    ]


def _text(value: Any) -> str:
    """Return a setting as text; the same text for all that is no plain data, such as a class."""
    if isinstance(value, (list, tuple)):
        return str([*map(_text, value)])
    return repr(value) if isinstance(value, (int, float, str)) else ""
