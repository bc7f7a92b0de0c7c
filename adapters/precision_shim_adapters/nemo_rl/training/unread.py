"""Find the keys on precision in a model's config that NeMo-RL accepts and does not read.

NeMo-RL accepts any key. Which key it reads from which section is in its source.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from precision_shim.precision.effect import names_precision, values_of

Keys = tuple[str, ...]
"""A key and, before it, the sections in which it is."""

_READS = re.compile(
    r"""\b(?=(\w+)[\s"'\])]*(?:(?:\[|\.(?:get|pop|setdefault)\()\s*["']|\.)(\w+))"""
)
"""Finds a section and a key that is read from it, such as ``config["megatron_cfg"]["fp8"``.

It consumes no text, because a key may be the section of the next key."""
_PASSED = re.compile(r"""(?:\*\*|\.update\()[\w.]*?(\w+)(?![\w.])((?:\[["']\w+["']\])*)""")
"""Matches a section that is passed on whole, such as ``**config["megatron_cfg"]["optimizer"]``."""


def unread(
    config: Mapping[str, object], *others: str, anywhere: bool = False
) -> Iterator[tuple[Keys, object]]:
    """Yield the keys on precision that nothing reads, with their values.

    ``others`` are sections that NeMo-RL does not read itself. ``anywhere``: the config is not a
    model's, and a key counts as read if NeMo-RL reads one of this name from any section.
    """
    every = {tuple(key.split(".")): value for key, value in values_of(config)}
    found = {keys: value for keys, value in every.items() if names_precision(keys[-1], value)}
    read, passed = _source() if found else (set(), set())
    names = {name for _, name in read} if anywhere else set()
    for keys, value in found.items():
        section = tuple(map(_section, keys[:-1]))
        ends = [section[:end] for end in range(1, len(section) + 1)]
        known = any(end[-len(one) :] == one for end in ends for one in passed)
        known = known or keys[-1] in names or bool({*others}.intersection(keys))
        if not known and (*(section or ("",))[-1:], keys[-1]) not in read:
            yield keys, value


def _section(name: str) -> str:
    """A section's name as variables have it, too: ``fp8`` for ``fp8_cfg`` and ``fp8_config``."""
    bare = re.sub(r"_?(cfg|config)$", "", name)
    return "" if bare in ("policy", "value") else bare


@functools.cache  # it reads all of NeMo-RL's source
def _source() -> tuple[set[Keys], set[Keys]]:
    """Each section and each key that NeMo-RL reads from it, and the sections it passes on.

    A variable such as ``cfg`` is a model's config, and in a rollout's modules a rollout's.
    """
    read, passed = set[Keys](), set[Keys]()
    spec = find_spec("nemo_rl")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in Path(folder).rglob("*.py"):
            own = "generation" if "generation" in file.parts else ""
            text = file.read_text("utf-8", "replace")
            read.update((_section(name) or own, key) for name, key in set(_READS.findall(text)))
            for name, inner in _PASSED.findall(text):
                names = (_section(one) for one in (name, *re.findall(r"\w+", inner)))
                passed.add(tuple(one for one in names if one))
    # NeMo-RL's GRPO only copies the rollout's section, for its own rollouts.
    return read, passed - {(), ("generation",)}
