"""In fp16, rescale gradients in SkyRL's store of LoRA adapters when the loss scale changes.

The LoRA adapters of one Megatron worker share the worker's optimizer and loss scaler. While one
LoRA adapter trains, SkyRL stores the gradients of all other LoRA adapters. A backward pass
multiplies gradients by the loss scale, and the step divides them by the loss scale. Before a LoRA
adapter's step, an overflow of another LoRA adapter may change the loss scale. The shim therefore
records the loss scale of stored gradients. When SkyRL copies stored gradients back, the shim
multiplies them by the ratio of the current loss scale to the recorded loss scale.

Delete this module when SkyRL stores gradients unscaled, or with their loss scale.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from precision_shim.adapting import Call, seam

from ..megatron import SCALING, dynamic_scalers
from ..megatron.acting.overflow import scale_of
from ..megatron.buffers import grad_buffers
from .megatron import TRAIN

GROUP = "megatron adapters"
"""The group of the seams at SkyRL's store of LoRA adapters."""

_STORE = f"{TRAIN}.workers.megatron.adapter_store:AdapterStore"
_HERE: dict[str, Any] = {
    "feature": SCALING,
    "group": GROUP,
    "delete_when": "SkyRL's store keeps gradients unscaled, or with their scale",
    "optional": True,
}
_SCALE = "_precision_shim_scale"
"""Name of the attribute with the gradients' loss scale, on a LoRA adapter's slot in SkyRL's store.
(A slot has no hash, so a mapping cannot have slots as keys.)"""

_optimizers: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""Maps SkyRL's store of LoRA adapters to the adapters' optimizer, which SkyRL does not pass to
``park_grads`` and ``unpark_grads``."""


@seam(
    f"{_STORE}._snapshot",
    only_if=(f"{_STORE}._snapshot",),
    why="copies an adapter's gradients into the store",
    relies_on=("cpu_grad_data", "grad_data", "_slots", "_current_id"),
    **_HERE,
)
def keep(call: Call, slot: Any, model_chunks: Any, optimizer: Any) -> Any:
    """Record the loss scale of the gradients that SkyRL stores for a LoRA adapter."""
    _optimizers[call.instance] = weakref.ref(optimizer)
    result = call.proceed()
    if _any_gradients(model_chunks):  # if the model has no gradients, SkyRL stores none
        _note(call.instance, slot)
    return result


@seam(
    f"{_STORE}._restore",
    only_if=(f"{_STORE}._restore",),
    why="copies an adapter's gradients out of the store",
    relies_on=("cpu_grad_data", "grad_data"),
    **_HERE,
)
def bring_back(call: Call, slot: Any, model_chunks: Any, optimizer: Any) -> Any:
    """When SkyRL copies a LoRA adapter's gradients back, rescale them to the current loss scale."""
    _optimizers[call.instance] = weakref.ref(optimizer)
    result = call.proceed()
    _rescale(call.instance, slot, model_chunks)
    return result


@seam(
    f"{_STORE}.park_grads",
    only_if=(f"{_STORE}.park_grads",),  # from 0.4
    why="copies the live gradients into the store before an offload frees them",
    relies_on=("cpu_grad_data", "_slots", "_current_id"),
    **_HERE,
)
def park(call: Call, model_chunks: Any) -> Any:
    """Record the loss scale of the gradients that SkyRL stores during an offload."""
    store = call.instance
    live = _any_gradients(model_chunks)
    result = call.proceed()
    slot = store._slots.get(store._current_id)
    if live and slot is not None:
        _note(store, slot)
    return result


@seam(
    f"{_STORE}.unpark_grads",
    only_if=(f"{_STORE}.unpark_grads",),  # from 0.4
    why="copies gradients out of the store after an offload",
    relies_on=("cpu_grad_data", "_slots", "_current_id", "_grads_parked"),
    **_HERE,
)
def unpark(call: Call, model_chunks: Any) -> Any:
    """When SkyRL copies gradients back after an offload, rescale them to the current loss scale."""
    store = call.instance
    parked = store._grads_parked
    result = call.proceed()
    slot = store._slots.get(store._current_id)
    if parked and not store._grads_parked and slot is not None:
        _rescale(store, slot, model_chunks)
    return result


def _note(store: Any, slot: Any) -> None:
    scale = _scale(store)
    if scale is not None:
        setattr(slot, _SCALE, scale)


def _rescale(store: Any, slot: Any, chunks: Any) -> None:
    scale = _scale(store)
    kept = getattr(slot, _SCALE, scale)
    if scale is None or kept is None or kept == scale:
        return
    with torch.no_grad():
        for gradients in _gradients(chunks):
            gradients.mul_(scale / kept)


def _scale(store: Any) -> float | None:
    reference = _optimizers.get(store)
    optimizer = None if reference is None else reference()
    scalers = [] if optimizer is None else dynamic_scalers(optimizer)
    return scale_of(scalers[0]) if scalers else None


def _gradients(chunks: Any) -> Iterator[torch.Tensor]:
    """Yield the gradients in the buffers of Megatron's DDPs, except those that an offload freed."""
    for buffer in grad_buffers(chunks):
        if buffer.grad_data is not None and buffer.grad_data.untyped_storage().size():
            yield buffer.grad_data


def _any_gradients(chunks: Any) -> bool:
    return next(_gradients(chunks), None) is not None
