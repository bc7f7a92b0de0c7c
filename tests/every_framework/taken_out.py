"""Any adapter leaves nothing behind when uninstalled, and its groups are refused as a whole."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

import precision_shim
from precision_shim.process.registry import entries, load
from precision_shim.seams import Seam


def namespaces(seams: Iterable[Seam]) -> dict[str, dict[str, int]]:
    """The imported modules and classes that a table of seams patches.

    Returns the identity of each object by its name, because wrapt's wrappers equal what they wrap.
    """
    owners = {
        target.rpartition("." if "." in target.partition(":")[2] else ":")[0]
        for seam in seams
        for target in (seam.target, *seam.aliases)
        if target.partition(":")[0] in sys.modules
    }
    found = {}
    for owner in owners:
        try:
            place = pkgutil.resolve_name(owner)
        except AttributeError:  # a seam is optional: this version lacks its class
            continue
        found[owner] = {name: id(value) for name, value in vars(place).items()}
    return found


def leaves_nothing_behind(on: Callable[..., Any], framework: str) -> None:
    """Install and uninstall the shim: each patched place is as it was before."""
    seams = load(entries(third_party=False)[framework]).seams
    before = namespaces(seams)
    found = on().frameworks[framework]
    assert found.state == "wrapped"
    assert found.tested
    now = namespaces(seams)
    for seam in found.seams:
        if seam.state == "wrapped":
            owner, _, name = seam.target.replace(":", ".").rpartition(".")
            (place,) = (key for key in now if key.replace(":", ".") == owner)
            assert now[place][name] != before[place].get(name), seam.target
    assert now != before
    precision_shim.uninstall()
    assert namespaces(seams) == before


def refused_whole(
    on: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, module: ModuleType, symbol: str
) -> None:
    """Under strict a missing symbol is an error, and its whole group of seams is refused."""
    place = f"{module.__name__}:SEAMS"
    (framework,) = (name for name, one in entries().items() if one.place == place)
    seams = tuple(replace(one, target=one.target.replace(symbol, "gone")) for one in module.SEAMS)
    monkeypatch.setattr(module, "SEAMS", seams)
    with pytest.raises(precision_shim.SeamError, match=rf"{framework}.*fp16-scaling.*gone"):
        on()
    found = precision_shim.status().frameworks[framework].seams
    (group,) = {one.group for one in found if "gone" in one.target}
    scaling = [one for one in found if (one.feature, one.group) == ("fp16-scaling", group)]
    assert len(scaling) > 1
    assert {one.state for one in scaling} == {"refused"}
