"""Stand-ins for TransformerEngine's optimizers, for machines without TransformerEngine or a GPU.

There is **no** stand-in for layers, such as ``TELinear``. Only the leaf module
``transformer_engine.pytorch.optimizers`` enters ``sys.modules``, where ``from a.b.c import x``
looks first. Megatron's modules that import it at import are imported before, and patched.
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
        checked_by: whose constructor checks: the real ``"transformer_engine"``, or ``"stand-in"``.
    """

    version: str
    fused_adam: type[FusedAdam]
    checked_by: str


def real_transformer_engine() -> tuple[str, type[Any]] | None:
    """Return version and ``FusedAdam`` of the installed TransformerEngine, if it can be imported.

    A stand-in, or a build without its CUDA libraries or for another torch, counts as none.
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
    imports the stand-ins. The module has ``__precision_shim_stand_in__ = True`` and
    ``__version__``. Megatron-core's ``get_te_version()`` and ``is_te_min_version()`` return
    ``version``. Entering the context imports the optimizers of an installed megatron-core. All
    changes are undone on exit; optimizers that were built inside the context still work. The
    context manager cannot be nested in itself.

    If a real TransformerEngine can be imported, and ``version`` is None or the real version, the
    real constructor checks the arguments, with a temporary CPU parameter. All other methods are the
    stand-in's, because the real ``step()`` needs a GPU.

    Args:
        version: a release, 1.13 or newer; None for the installed one, or else 2.11.0.

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

    The names are those of megatron-core 0.15.3, 0.16.1, 0.18.2 and 0.19.0; none is added to a
    version that lacks it. Other modules import the optimizers at each use, or need kernels
    (``multi_tensor_*``) that have no stand-in.
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
