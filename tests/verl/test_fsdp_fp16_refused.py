"""Older verl's engines without a loss scaler: refused by name where fp16 is asked of them.

The newer ones are scaled: test_engines.py. Their packages are in none of these environments. The
classes are verl's real ones, imported over packages that are empty; what is asked of them is read
from verl's real configs.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
from packaging.version import Version

import precision_shim
from precision_shim.errors import UnsupportedPrecisionError

from .conftest import VERL

ENGINES = {
    "veomni": ("veomni.transformer_impl", "VeOmniEngine", "0.7", "0.9"),
    "torchtitan": ("torchtitan.transformer_impl", "TorchTitanEngine", "0.7", "0.9.1"),
    "automodel": ("automodel.transformer_impl", "AutomodelEngine", "0.8", "0.9"),
}
CONFIGS = {
    "veomni": ("VeOmniEngineConfig", {"dtype": "float16"}),
    "torchtitan": ("TorchtitanEngineConfig", {"dtype": "float16"}),
    "automodel": ("AutomodelEngineConfig", {"mp_param_dtype": "fp16"}),
}


class Anything(type):
    """A class that is good as a base, a decorator's maker, an annotation; so are its attributes."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return nothing(name)

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


def nothing(name: str) -> Any:
    """A class that does nothing; called twice, as a decorator with arguments, it gives back."""
    return Anything(
        name,
        (),
        {
            "__init__": lambda self, *args, **kwargs: None,
            "__call__": lambda self, *args, **kwargs: args[0] if args else None,
        },
    )


class EmptyModule(ModuleType):
    """A module in which every name is there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return nothing(name)


class Empty:
    """Finds every module of the engines' packages."""

    packages = ("veomni", "torchtitan", "nemo_automodel")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] in self.packages:
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: ModuleSpec) -> Any:
        return EmptyModule(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


@pytest.fixture
def engine_of() -> Iterator[Callable[[str, bool], Any]]:
    """An instance of a real engine class with a real config, without what its start would build."""
    known, finder = set(sys.modules), Empty()
    sys.meta_path.append(finder)  # type: ignore[arg-type]

    def make(name: str, fp16: bool) -> Any:
        module, kind, since, scaled = ENGINES[name]
        if not Version(since) <= VERL < Version(scaled):
            pytest.skip(f"verl has the {name} engine from {since}, and it is scaled from {scaled}")
        configs = importlib.import_module("verl.workers.config")
        engine = object.__new__(
            getattr(importlib.import_module(f"verl.workers.engine.{module}"), kind)
        )
        config, asked = CONFIGS[name]
        plain = {key: value for key, value in asked.items() if key == "strategy"}
        engine.engine_config = getattr(configs, config)(**(asked if fp16 else plain))
        return engine

    yield make
    sys.meta_path.remove(finder)  # type: ignore[arg-type]
    for module in set(sys.modules) - known:  # verl's own stay: it registers an engine once
        if module.partition(".")[0] in Empty.packages:
            del sys.modules[module]


def start(engine: Any) -> None:
    with contextlib.suppress(Exception):  # nothing of what it builds is there
        engine.initialize()


@pytest.mark.parametrize("name", ENGINES)
def test_said_by_name(name: str, engine_of: Any, shim: Any) -> None:
    shim(features=["fp16-scaling"])
    engine = engine_of(name, True)
    with pytest.warns(precision_shim.PrecisionShimWarning, match=f"{name} engine .*scaler"):
        start(engine)
    assert any(one.chosen == "left as it is" for one in precision_shim.status().decisions)


@pytest.mark.skipif(
    Version("0.9") <= VERL, reason="the engines that are scaled there cannot be over empty packages"
)
@pytest.mark.parametrize("name", ENGINES)
def test_refused_in_strict_mode(name: str, engine_of: Any, shim: Any) -> None:
    shim(features=["fp16-scaling"], strict=True)
    engine = engine_of(name, True)
    with pytest.raises(UnsupportedPrecisionError, match=f"{name} engine"):
        engine.initialize()


@pytest.mark.parametrize("name", ENGINES)
def test_silent_where_no_float16_is_asked(name: str, engine_of: Any, shim: Any) -> None:
    shim(features=["fp16-scaling"])
    start(engine_of(name, False))
    assert precision_shim.status().decisions == ()
