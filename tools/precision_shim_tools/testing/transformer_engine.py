"""Stand-ins for TransformerEngine's optimizers, for machines without TransformerEngine or a GPU.

Megatron-core's precision-aware optimizer needs only the class ``FusedAdam`` of TransformerEngine.
:func:`stand_in_transformer_engine` provides this class inside its context. There is **no** stand-in
for TransformerEngine's layers, such as ``TELinear``: Megatron's layer specs, attention and fp8 code
find TransformerEngine only if it is installed.

Only the leaf module ``transformer_engine.pytorch.optimizers`` is put into ``sys.modules``. Python's
``from a.b.c import x`` searches ``sys.modules`` for ``a.b.c`` first and does not import the
parents. The Megatron modules that run ``from ... import FusedAdam`` at import are imported before
the stand-in exists, and are patched inside the context.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from packaging.version import Version

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
    """Return the version and the ``FusedAdam`` of the installed TransformerEngine.

    The result is None if TransformerEngine is absent, cannot be imported (built for another torch,
    no CUDA libraries), or is a stand-in.
    """
    try:
        with warnings.catch_warnings():
            # Hide TransformerEngine's warnings at import; only an error of the import matters here.
            warnings.simplefilter("ignore")
            import transformer_engine
            from transformer_engine.pytorch import optimizers
        if getattr(optimizers, _MARK, False) or getattr(transformer_engine, _MARK, False):
            return None
        return str(transformer_engine.__version__), optimizers.FusedAdam
    except (ImportError, OSError, RuntimeError, AttributeError):
        return None


@contextmanager
def stand_in_transformer_engine(version: str | None = None) -> Iterator[StandIn]:
    """Let Megatron-core's optimizers find a ``FusedAdam`` of TransformerEngine ``version``.

    Inside the context, ``from transformer_engine.pytorch.optimizers import FusedAdam, FusedSGD``
    imports the stand-ins. The imported module has the attributes ``__precision_shim_stand_in__ =
    True`` and ``__version__``. Megatron-core's ``get_te_version()`` and ``is_te_min_version()``
    return ``version``. If megatron-core is installed, entering the context imports its optimizers.
    All changes are undone on exit. Optimizers that were built inside the context still work after
    the exit. The context manager cannot be nested in itself.

    If a real TransformerEngine can be imported, and ``version`` is None or the real version, the
    real constructor checks the arguments, with a temporary CPU parameter. All other methods are the
    stand-in's, because the real ``step()`` needs a GPU.

    Args:
        version: the TransformerEngine release whose rules the stand-in follows, 1.13 or newer. None
            means the installed version, or 2.11.0 if TransformerEngine is not installed.

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

    leaf = types.ModuleType(_LEAF, "Stand-in for TransformerEngine's optimizers.")
    leaf.__spec__ = importlib.machinery.ModuleSpec(_LEAF, loader=None)
    vars(leaf).update(
        {
            _MARK: True,
            "__version__": stand_in.version,
            "FusedAdam": stand_in.fused_adam,
            "FusedSGD": FusedSGD,
        }
    )
    with ExitStack() as undo:
        _patch_megatron(stand_in, undo)
        if _LEAF in sys.modules:
            undo.callback(sys.modules.__setitem__, _LEAF, sys.modules[_LEAF])
        else:
            undo.callback(sys.modules.pop, _LEAF, None)
        sys.modules[_LEAF] = leaf
        parent = sys.modules.get("transformer_engine.pytorch")
        if parent is not None:
            undo.enter_context(mock.patch.object(parent, "optimizers", leaf, create=True))
        yield stand_in


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


def _patch_megatron(stand_in: StandIn, undo: ExitStack) -> None:
    """Patch the Megatron modules that bind TransformerEngine's names at import.

    The values were made from the source of megatron-core 0.15.3, 0.16.1, 0.18.2 and 0.19.0. Names
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
        "megatron.core.utils": {"_te_version": Version(stand_in.version)},
    }
    with suppress(ImportError), warnings.catch_warnings():
        # Megatron warns that TransformerEngine and Apex are absent.
        warnings.simplefilter("ignore")
        for name in values:
            importlib.import_module(name)
    for name, new in values.items():
        module = sys.modules.get(name)
        for attribute, value in new.items():
            if hasattr(module, attribute):
                undo.enter_context(mock.patch.object(module, attribute, value))
