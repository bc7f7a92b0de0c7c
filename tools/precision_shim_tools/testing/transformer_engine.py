"""Stand-ins for TransformerEngine's optimizers, for machines without TransformerEngine or a GPU.

Megatron-core's precision-aware optimizer needs only the class ``FusedAdam`` of TransformerEngine.
:func:`stand_in_transformer_engine` provides this class inside its context. There is **no** stand-in
for TransformerEngine's layers, such as ``TELinear``: Megatron's layer specs, attention and fp8 code
find TransformerEngine only if it is installed.

Only the leaf module ``transformer_engine.pytorch.optimizers`` is put into ``sys.modules``. Python's
``from a.b.c import x`` searches ``sys.modules`` for ``a.b.c`` first and does not import the
parents. In Megatron modules that have already run ``from ... import FusedAdam``, the class is
replaced at once. A Megatron module that is imported inside the context is patched right after its
import. On exit, the original values are restored in all patched modules.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from .fused_adam import FusedAdam, FusedSGD, fused_adam_for
from .releases import DEFAULT_VERSION

__all__ = ["StandIn", "real_transformer_engine", "stand_in_transformer_engine"]

_LEAF = "transformer_engine.pytorch.optimizers"
_MARK = "__precision_shim_stand_in__"


@dataclass(frozen=True)
class StandIn:
    """What Megatron finds inside the context of :func:`stand_in_transformer_engine`.

    Attributes:
        version: the TransformerEngine version that Megatron finds.
        fused_adam: the class that replaces ``FusedAdam``.
        checked_by: whose constructor checks the arguments, ``"transformer_engine"`` (the real one)
            or ``"stand-in"``.
    """

    version: str
    fused_adam: type[FusedAdam]
    checked_by: str


def real_transformer_engine() -> tuple[str, type[Any]] | None:
    """Return the installed TransformerEngine, if its optimizers can be imported.

    Returns:
        ``(version, FusedAdam)``, or None if TransformerEngine is absent, cannot be imported (built
        for another torch, no CUDA libraries), or is a stand-in.
    """
    if not _quietly_findable("transformer_engine"):
        return None
    try:
        with warnings.catch_warnings():
            # Hide TransformerEngine's warnings at import; only an error of the import matters here.
            warnings.simplefilter("ignore")
            import transformer_engine
            from transformer_engine.pytorch import optimizers
    except (ImportError, OSError, RuntimeError, AttributeError):
        return None
    if getattr(optimizers, _MARK, False) or getattr(transformer_engine, _MARK, False):
        return None
    adam = getattr(optimizers, "FusedAdam", None)
    version = getattr(transformer_engine, "__version__", None)
    if adam is None or version is None or not isinstance(adam, type):
        return None
    return str(version), adam


def _quietly_findable(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


@contextmanager
def stand_in_transformer_engine(version: str | None = None) -> Iterator[StandIn]:
    """Let Megatron-core's optimizers find a ``FusedAdam`` of TransformerEngine ``version``.

    Inside the context, ``from transformer_engine.pytorch.optimizers import FusedAdam, FusedSGD``
    imports the stand-ins. The imported module has the attributes ``__precision_shim_stand_in__ =
    True`` and ``__version__``. Megatron-core's ``get_te_version()`` and ``is_te_min_version()``
    return ``version``, whether ``megatron.core`` is imported before or inside the context. All
    changes are undone on exit, also in modules that were imported inside the context. Optimizers
    that were built inside the context still work after the exit. The context manager cannot be
    nested in itself.

    If a real TransformerEngine can be imported, and ``version`` is None or the real version, the
    real constructor checks the arguments. The real constructor receives a temporary CPU parameter.
    All other methods are the stand-in's, because the real ``step()`` needs a GPU.
    :attr:`StandIn.checked_by` names the constructor that checks the arguments. If TransformerEngine
    is installed, Megatron also imports TransformerEngine's layers, which have no stand-in.

    Args:
        version: the TransformerEngine release whose rules the stand-in follows, 1.13 or newer. None
            means the installed version, or 2.11.0 if TransformerEngine is not installed.

    Yields:
        A :class:`StandIn`.

    Raises:
        ValueError: there is no stand-in for ``version``.
        RuntimeError: the context of another stand-in has not ended.
    """
    if getattr(sys.modules.get(_LEAF), _MARK, False):
        raise RuntimeError("a stand-in for TransformerEngine is already in force")
    real = real_transformer_engine()
    if real is not None and version in (None, real[0]):
        stand_in = StandIn(real[0], _check_with(real[1], real[0]), "transformer_engine")
    else:
        version = DEFAULT_VERSION if version is None else version
        stand_in = StandIn(version, fused_adam_for(version), "stand-in")

    leaf = _leaf(stand_in)
    with ExitStack() as undo:
        if _LEAF in sys.modules:
            undo.callback(sys.modules.__setitem__, _LEAF, sys.modules[_LEAF])
        else:
            undo.callback(sys.modules.pop, _LEAF, None)
        sys.modules[_LEAF] = leaf
        parent = sys.modules.get("transformer_engine.pytorch")
        if parent is not None:
            undo.enter_context(mock.patch.object(parent, "optimizers", leaf, create=True))
        patches = _megatron_patches(stand_in)
        for name, patch in patches.items():
            module = sys.modules.get(name)
            if module is not None:
                patch(module, undo)
        finder = _AfterImport(patches, undo, leaf)
        sys.meta_path.insert(0, finder)
        undo.callback(sys.meta_path.remove, finder)
        yield stand_in


def _leaf(stand_in: StandIn) -> types.ModuleType:
    leaf = types.ModuleType(_LEAF, "Stand-in for TransformerEngine's optimizers.")
    leaf.__spec__ = importlib.machinery.ModuleSpec(_LEAF, loader=None)
    setattr(leaf, _MARK, True)
    leaf.__dict__["__version__"] = stand_in.version
    leaf.__dict__["FusedAdam"] = stand_in.fused_adam
    leaf.__dict__["FusedSGD"] = FusedSGD
    return leaf


def _check_with(real_adam: type[Any], version: str) -> type[FusedAdam]:
    """Return the stand-in for ``version``; its constructor first calls the real constructor."""
    base = fused_adam_for(version)
    real_init: Callable[..., None] = real_adam.__init__

    def __init__(self: FusedAdam, params: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        from .megatron_cpu import cuda_means_cpu

        with cuda_means_cpu():
            real_adam([torch.nn.Parameter(torch.zeros(1))], *args, **kwargs)
        base.__init__(self, params, *args, **kwargs)

    # Megatron reads the signature to find out which arguments the class accepts.
    __init__.__signature__ = inspect.signature(real_init)  # type: ignore[attr-defined]
    members = {"__init__": __init__, "te_version": version, "__doc__": base.__doc__}
    return type("FusedAdam", (base,), members)


_Patch = Callable[[types.ModuleType, ExitStack], None]


def _megatron_patches(stand_in: StandIn) -> dict[str, _Patch]:
    """Return the patches of Megatron modules that bind TransformerEngine's names at import.

    The patches were made from the source of megatron-core 0.15.3, 0.16.1, 0.18.2 and 0.19.0. Names
    that a Megatron version lacks are not added to this version's modules. All further Megatron
    modules stay unpatched: they import the optimizers at each use, or need TransformerEngine's
    kernels (``multi_tensor_*``), which have no stand-in.
    """
    values: dict[str, dict[str, Any]] = {
        "megatron.core.optimizer": {
            "Adam": stand_in.fused_adam,
            "SGD": FusedSGD,
            "USING_PYTORCH_OPTIMIZER": False,
        },
        "megatron.core.optimizer.distrib_optimizer": {
            "Adam": stand_in.fused_adam,
            "HAVE_APEX_OR_TE": True,
            "USING_TE_OPTIMIZER": True,
            "USING_APEX_OPTIMIZER": False,
        },
    }

    def with_values(new: dict[str, Any]) -> _Patch:
        def patch(module: types.ModuleType, undo: ExitStack) -> None:
            for name, value in new.items():
                if hasattr(module, name):
                    undo.enter_context(mock.patch.object(module, name, value))

        return patch

    def version_cache(module: types.ModuleType, undo: ExitStack) -> None:
        parse = getattr(module, "PkgVersion", None)
        if parse is not None and hasattr(module, "_te_version"):
            undo.enter_context(mock.patch.object(module, "_te_version", parse(stand_in.version)))

    patches = {name: with_values(new) for name, new in values.items()}
    patches["megatron.core.utils"] = version_cache
    return patches


class _AfterImport(importlib.abc.MetaPathFinder):
    """Patches a Megatron module right after its import.

    While Python imports the Megatron module, ``sys.modules`` lacks the stand-in, so the module gets
    the same values as without the stand-in. Undoing the patch restores the module's own values.
    """

    def __init__(self, patches: dict[str, _Patch], undo: ExitStack, leaf: types.ModuleType) -> None:
        self._patches = patches
        self._undo = undo
        self._leaf = leaf
        self._hidden = 0
        self._asking: set[str] = set()

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._patches or fullname in self._asking:
            return None
        self._asking.add(fullname)
        try:
            for finder in [f for f in sys.meta_path if f is not self]:
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    break
            else:
                return None
        finally:
            self._asking.discard(fullname)
        if spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader, self)
        return spec

    def run(self, loader: importlib.abc.Loader, module: types.ModuleType) -> None:
        if self._hidden == 0:
            sys.modules.pop(_LEAF, None)
        self._hidden += 1
        try:
            loader.exec_module(module)
        finally:
            self._hidden -= 1
            if self._hidden == 0:
                sys.modules[_LEAF] = self._leaf
        self._patches[module.__name__](module, self._undo)


class _PatchingLoader(importlib.abc.Loader):
    def __init__(self, inner: importlib.abc.Loader, finder: _AfterImport) -> None:
        self._inner = inner
        self._finder = finder

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        # Restore the original loader, because inspect, pickle and importlib.resources read it.
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._finder.run(self._inner, module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
