"""Any adapter leaves nothing behind when uninstalled, and its groups are refused as a whole."""

from __future__ import annotations

import gc
import importlib
import pkgutil
import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

import precision_shim
from precision_shim.process import session
from precision_shim.process.framework import Adapter
from precision_shim.process.registry import entries, load
from precision_shim.process.settings import FEATURES, resolve
from precision_shim.seams import Seam, check
from precision_shim.seams._engine import SeamEngine


def namespaces(seams: Iterable[Seam]) -> dict[str, dict[str, int]]:
    """The imported modules and classes that a table of seams patches, and the patched functions.

    Returns the identity of each object by its name, because wrapt's wrappers equal what they wrap.
    """
    found = {}
    for target in {target for seam in seams for target in (seam.target, *seam.aliases)}:
        if target.partition(":")[0] in sys.modules:
            for place in (place_of(target)[0], target):
                with suppress(AttributeError):  # this version lacks the class, or it has no names
                    # Names with a colon only: the other form imports the packages above a module,
                    # of which one may have failed after the module itself was imported.
                    names = vars(pkgutil.resolve_name(place if ":" in place else f"{place}:"))
                    found[place] = {name: id(value) for name, value in names.items()}
    return found


def place_of(target: str) -> tuple[str, str]:
    """The module or the class that holds a seam's symbol, and the symbol's name there."""
    place, _, name = target.rpartition("." if "." in target.partition(":")[2] else ":")
    return place, name


def held(target: str, found: dict[str, dict[str, int]]) -> int | None:
    """The identity of the object that a place has under a symbol's name."""
    place, name = place_of(target)
    return found.get(place, {}).get(name)


def is_patched(seam: Seam, before: dict[str, dict[str, int]]) -> bool:
    """Whether a symbol, and each copy that a module had of it, is another object than before."""
    now, original = namespaces([seam]), held(seam.target, before)
    copies = [alias for alias in seam.aliases if original == held(alias, before) is not None]
    return all(held(one, now) != held(one, before) for one in (seam.target, *copies))


class Seams:
    """Every seam of a framework is patched and taken out, alone and together with all others.

    A derived class that is in a room without the fixture ``framework`` adds it: it imports the
    framework and returns its name.
    """

    def test_each_alone(self, framework: str) -> None:
        adapter = load(entries(third_party=False)[framework])
        alone = [adapter.replace(seams=(seam,)) for seam in adapter.seams]
        engines = [self.in_and_out(one) for one in alone if can_be_patched(one)]
        assert engines
        gc.collect()
        assert not [engine for engine in engines if engine() is not None]

    def in_and_out(self, adapter: Adapter) -> weakref.ref[SeamEngine]:
        (seam,) = adapter.seams
        before, finders, faults = namespaces([seam]), list(sys.meta_path), list[Any]()
        engine = SeamEngine(
            features=[seam.feature],
            settings=resolve(environ={}),
            strict=False,
            on_fault=lambda *fault: faults.append(fault),
            describe=lambda adapter: adapter.framework,
        )
        engine.add(adapter)
        once = namespaces([seam])
        assert not faults
        assert is_patched(seam, before), seam.target
        engine.add(adapter)
        engine.catch_up()
        assert namespaces([seam]) == once, seam.target
        assert engine.remove() == []
        assert namespaces([seam]) == before, seam.target
        assert sys.meta_path == finders
        return weakref.ref(engine)

    def test_all_together(self, framework: str, shim: Callable[..., precision_shim.Status]) -> None:
        seams = load(entries(third_party=False)[framework]).seams
        before, finders = namespaces(seams), list(sys.meta_path)
        for _ in range(2):
            for _ in range(2):
                found = shim(frameworks=framework, export=False).frameworks[framework]
                assert found.state == "wrapped"
                states = {one.target: one.state for one in found.seams}
                for seam in seams:
                    if states.get(seam.target) == "wrapped":
                        assert is_patched(seam, before), seam.target
            engine = weakref.ref(session._current.engine)  # type: ignore[union-attr]
            precision_shim.uninstall()
            assert namespaces(seams) == before
            assert sys.meta_path == finders
            gc.collect()
            assert engine() is None


def can_be_patched(adapter: Adapter) -> bool:
    """Whether this version has the one seam's symbol, in a module that this machine can import."""
    (seam,) = adapter.seams
    states = [one.state for one in check(adapter, FEATURES, resolve(environ={})).predicted()]
    if states != ["pending"]:  # this version lacks the place, or has the feature itself
        return False
    with suppress(Exception):  # such as a package that needs a GPU
        importlib.import_module(seam.module)
        return True
    return False


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
