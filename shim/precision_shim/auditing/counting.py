"""Count the bytes of the tensors in ``Reading`` objects, each storage once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from ..precision.dtypes import live_name, name_of
from .reading import Owned, Reading, local, plain, unique
from .record import COMPONENTS, MOMENTS, OF_MODEL, AuditComponent

_Tensors = Iterable[torch.Tensor]


@dataclass
class Measured:
    """The measured size of one component, such as ``exp_avg``.

    Attributes:
        bytes: size of the elements, without padding.
        allocated: size of the storages.
        host: size of the storages in the host's memory.
        elements: number of elements.
        dtypes: names of the tensors' dtypes.
        devices: device types of the tensors.
        fp8: whether bytes are fp8, as in TransformerEngine's tensors; else they are codes.
    """

    bytes: int = 0
    allocated: int = 0
    host: int = 0
    elements: int = 0
    dtypes: set[str] = field(default_factory=set)
    devices: set[str] = field(default_factory=set)
    fp8: bool = False


def measure(readings: Sequence[Reading]) -> list[dict[str, Measured]]:
    """Count the components of each ``Reading``; a storage that several share counts once."""
    found: list[dict[str, Measured]] = [{} for _ in readings]
    counted: set[int] = set()
    # The outer loop is over components: a storage that two components share counts for the first
    # component.
    for component in COMPONENTS:
        before = set(counted)
        for reading, sizes in zip(readings, found, strict=True):
            tensors, more = _tensors(reading, component)
            declared = (
                getattr(reading.declared_states, component, None) if component in MOMENTS else None
            )
            stepped = (state.stepped for state in reading.owned)
            fp8 = declared is not None and torch.uint8 in map(declared, stepped)
            sizes[component] = size = Measured(fp8=fp8)
            for tensor in unique(tensors):
                _count(size, tensor, reading.padding.get(id(tensor), 0), before, counted)
            for tensor in more:
                for piece in plain(tensor):
                    _count_storage(size, piece, counted)
            for tensor in reading.local_sums if component == "grad_buckets" else ():
                size.bytes += tensor.untyped_storage().nbytes()
                _count_storage(size, tensor, counted)
    return found


def _count(
    size: Measured, tensor: torch.Tensor, padded: int, before: set[int], counted: set[int]
) -> None:
    """Add a tensor to a component, unless an earlier component has its storage."""
    held = local(tensor)
    fp8, numel = size.fp8 or hasattr(held, "_fp8_dtype"), held.numel()
    if not numel:
        if tensor.numel():  # a DTensor without elements on this rank
            size.dtypes.add(live_name(tensor.dtype, fp8=fp8))
        return
    pieces = list(plain(tensor))
    if any(piece.untyped_storage()._cdata in before for piece in pieces):
        return
    size.elements += numel - padded
    for piece in pieces:
        size.dtypes.add(live_name(piece.dtype, fp8=fp8))
        size.devices.add(piece.device.type)
        if piece.untyped_storage().nbytes():  # frameworks resize storages of offloaded tensors to 0
            size.bytes += (piece.numel() - padded) * piece.element_size()
        _count_storage(size, piece, counted)


def _count_storage(size: Measured, piece: torch.Tensor, counted: set[int]) -> None:
    storage = piece.untyped_storage()
    if storage._cdata in counted:
        return
    counted.add(storage._cdata)
    if piece.device.type == "meta":
        return
    size.allocated += storage.nbytes()
    if piece.device.type == "cpu":
        size.host += storage.nbytes()


def _tensors(reading: Reading, component: str) -> tuple[_Tensors, _Tensors]:
    """Return a component's tensors, and further tensors whose storages alone count."""
    owned = reading.owned
    found: dict[str, tuple[_Tensors, _Tensors]] = {
        "params": (reading.trainable, reading.also_params),
        "frozen": (reading.frozen, ()),
        "grad_buckets": (reading.bucket_views.values(), reading.buckets),
        "grad_copies": (reading.gradients, ()),
        "master": ((tensor for state in owned for tensor in state.masters), ()),
        "exp_avg": ((state.exp_avg for state in owned if state.exp_avg is not None), ()),
        "exp_avg_sq": ((state.exp_avg_sq for state in owned if state.exp_avg_sq is not None), ()),
        "other": ((*(tensor for state in owned for tensor in state.other), *reading.other), ()),
    }
    return found[component]


def component_of(reading: Reading, name: str, found: Measured, covered: int) -> AuditComponent:
    """Make a component of a ``Reading``; ``covered`` is the divisor of ``bytes_per_parameter``."""
    later = reading.later(name) if name in ("master", "exp_avg", "exp_avg_sq") else set()
    if later or (name == "other" and reading.states_unknown):
        state = "later"
    elif found.elements or found.allocated:
        state = "live"
    else:
        copies = name == "grad_copies" and reading.copies_later
        waits = copies and any(not state.has_state for state in reading.owned)
        state = "later" if waits else "none"
    return AuditComponent(
        dtypes=tuple(sorted({*found.dtypes, *map(name_of, later)})),
        bytes=found.bytes,
        allocated=found.allocated,
        bytes_per_parameter=found.bytes / covered if covered else 0.0,
        sharded=is_sharded(reading, name) and state != "none",
        device="+".join(sorted(found.devices)),
        state=state,
    )


def is_sharded(reading: Reading, name: str) -> bool:
    """Whether a component is sharded over the ranks of the data-parallel group."""
    if name in OF_MODEL:
        return reading.params_sharded and name != "grad_buckets"
    if name == "other":  # each rank has all step counts and scales
        owned = ((state, tensor) for state in reading.owned for tensor in state.other)
        return reading.sharded and any(_is_of_shard(tensor, state) for state, tensor in owned)
    return reading.sharded


def _is_of_shard(tensor: torch.Tensor, state: Owned) -> bool:
    """Whether a state, such as a momentum, has a value for each element of the parameter."""
    return tensor.dim() > 0 and local(tensor).numel() == local(state.stepped).numel()
