"""Imports Megatron-Bridge without TransformerEngine or Megatron-Energon.

Megatron-Bridge's import names classes of TransformerEngine, for its LoRA layers and its weight
mappings. From 0.6 on the import also names classes of Megatron-Energon, for its data loaders.
Without these classes the import fails. ``import_megatron_bridge`` provides placeholders: classes
that can be named and subclassed, and do nothing. After the import ``import_megatron_bridge``
removes the placeholders from ``sys.modules``, so that no other code mistakes them for real classes.
Models are built from Megatron's own layers (``transformer_layer_spec``).
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence

import torch

__all__ = ["import_megatron_bridge", "import_with_placeholders"]

_ENGINE, _ENERGON = "transformer_engine", "megatron.energon"
_PACKAGES = frozenset(
    {"ops", "optimizers", "module", "pytorch", "common", "tensor", "quantization"}
)
# These modules must be imported while TransformerEngine is absent. Megatron then decides that
# TransformerEngine is absent, and modelopt does not register the layer classes of our placeholders
# twice.
_BEFORE = (
    "megatron.core",
    "megatron.core.optimizer",
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "modelopt.torch",
)


def import_megatron_bridge() -> types.ModuleType:
    """Import ``megatron.bridge``, with placeholders for the absent packages.

    Returns:
        The module ``megatron.bridge``.

    Raises:
        ImportError: Megatron-Bridge or another package is missing.
    """
    return import_with_placeholders("megatron.bridge", "megatron.bridge.training.config")


def import_with_placeholders(*modules: str) -> types.ModuleType:
    """Import modules that name classes of TransformerEngine or Megatron-Energon.

    Returns:
        The first of the modules.

    Raises:
        ImportError: something else is missing.
    """
    absent = tuple(one for one in (_ENGINE, _ENERGON) if not _is_there(one))
    if _ENGINE in absent:
        for name in _BEFORE:
            importlib.import_module(name)
    kept = {name: sys.modules.pop(name) for name in _beneath(absent)}
    finder = _Placeholders(absent)
    sys.meta_path.insert(0, finder)
    try:
        for name in modules:
            importlib.import_module(name)
        return sys.modules[modules[0]]
    finally:
        sys.meta_path.remove(finder)
        for name in _beneath(absent):
            del sys.modules[name]
        sys.modules.update(kept)


def _is_there(root: str) -> bool:
    return root in sys.modules or importlib.util.find_spec(root) is not None


def _beneath(roots: Sequence[str]) -> list[str]:
    return [name for name in sys.modules if _root_of(name, roots)]


def _root_of(name: str, roots: Sequence[str]) -> str | None:
    return next((one for one in roots if name == one or name.startswith(f"{one}.")), None)


class _Named:
    """Placeholder for a class, decorator or function of Megatron-Energon."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        base: type = _Named
        if _root_of(self.__name__, (_ENGINE,)):
            if name in _PACKAGES:
                return importlib.import_module(f"{self.__name__}.{name}")
            base = torch.nn.Module
        placeholder = type(name, (base,), {"__module__": self.__name__})
        setattr(self, name, placeholder)
        return placeholder


class _Placeholders(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = roots

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if _root_of(name, self._roots) is None:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        module.__version__ = "0.0.0"  # type: ignore[attr-defined]
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        return
