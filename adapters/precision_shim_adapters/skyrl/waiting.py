"""SkyRL's store of LoRA adapters in fp16: gradients that wait while the loss scale changes.

The adapters of one Megatron worker share its optimizer, and so its loss scaler. The store keeps an
adapter's gradients while another adapter trains, until the first adapter's own step. They were
scaled with the scale of their backward pass, and the step divides them by the scale that the other
adapter's steps have left. So the shim notes the scale of what the store keeps, and multiplies by
the change when the gradients come back.

Delete when: SkyRL's store keeps gradients unscaled, or with their scale.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from precision_shim.adapting import Call, seam

from ..megatron import SCALING, dynamic_scalers
from ..megatron.acting.overflow import scale_of
from .megatron import TRAIN

GROUP = "megatron adapters"
"""The group of the seams at the store."""

_STORE = f"{TRAIN}.workers.megatron.adapter_store:AdapterStore"
_HERE: dict[str, Any] = {
    "feature": SCALING,
    "group": GROUP,
    "delete_when": "SkyRL's store keeps gradients unscaled, or with their scale",
    "optional": True,
}
_SCALE = "_precision_shim_scale"
"""The attribute of a slot that has the scale of the slot's gradients: written by ``_note``, read by
``_rescale``. (A slot is a dataclass without a hash: no key of a mapping.)"""

_optimizers: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""Maps a store to the optimizer of its adapters: written by ``keep`` and ``bring_back``, for the
two functions that do not get the optimizer."""


@seam(
    f"{_STORE}._snapshot",
    only_if=(f"{_STORE}._snapshot",),
    why="copies an adapter's gradients into the store",
    relies_on=("cpu_grad_data", "grad_data", "_slots", "_current_id"),
    **_HERE,
)
def keep(call: Call, slot: Any, model_chunks: Any, optimizer: Any) -> Any:
    """Note the loss scale with which the gradients of a slot were scaled."""
    _optimizers[call.instance] = weakref.ref(optimizer)
    result = call.proceed()
    if any(True for _ in _gradients(model_chunks)):  # otherwise the store keeps what it has
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
    """Give the gradients of a slot the scale that the coming step divides by."""
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
    """Note the loss scale of gradients that are kept over an offload."""
    store = call.instance
    live = any(True for _ in _gradients(model_chunks))
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
    """Give gradients that were kept over an offload the scale that the coming step divides by."""
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
    """The loss scale now; ``None`` where it never changes."""
    reference = _optimizers.get(store)
    optimizer = None if reference is None else reference()
    scalers = [] if optimizer is None else dynamic_scalers(optimizer)
    return scale_of(scalers[0]) if scalers else None


def _gradients(chunks: Any) -> Iterator[torch.Tensor]:
    """The gradients in the buffers of Megatron's DDPs, without those that an offload has freed."""
    for chunk in chunks:
        for kind in ("buffers", "expert_parallel_buffers"):
            buffers = getattr(chunk, kind, ())
            for buffer in buffers if isinstance(buffers, list) else ():
                if buffer.grad_data is not None and buffer.grad_data.untyped_storage().size():
                    yield buffer.grad_data
