"""Count the bytes of the tensors in ``Reading`` objects, each storage once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ..errors import AuditError
from ..precision.dtypes import name_of
from .reading import Owned, Reading, local, plain, unique
from .record import COMPONENTS, OF_MODEL, AuditComponent

_NO_PADDING: Mapping[int, int] = {}


class Counter:
    """Counts each storage once, for the first component that has a tensor in the storage."""

    def __init__(self) -> None:
        self._counted: set[int] = set()
        self._before: set[int] = set()
        self.host = 0

    def next_component(self) -> None:
        """Begin a new component; storages of earlier components are not counted again."""
        self._before = set(self._counted)

    def _storages(self, tensor: torch.Tensor) -> list[tuple[torch.Tensor, Any]]:
        return [(piece, piece.untyped_storage()) for piece in plain(tensor)]

    def count(
        self,
        tensors: Iterable[torch.Tensor],
        more: Iterable[torch.Tensor] = (),
        padding: Mapping[int, int] = _NO_PADDING,
    ) -> Measured:
        """Count the tensors whose storages were not counted for an earlier component.

        Args:
            tensors: tensors whose elements and storages are counted.
            more: further tensors; only their storages are counted, padding included.
            padding: maps a tensor's ``id`` to the number of the tensor's elements that are padding.
        """
        found = Measured()
        for tensor in unique(tensors):
            if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
                raise AuditError(
                    "audit(model=...): a lazy module has parameters without a shape. Pass a batch "
                    "through the model first."
                )
            numel = local(tensor).numel()
            padded = padding.get(id(tensor), 0)
            if not numel and tensor.numel():  # a DTensor without elements on this rank
                found.dtypes.add(tensor.dtype)
            storages = self._storages(tensor) if numel else []
            if not storages or any(storage._cdata in self._before for _, storage in storages):
                continue
            found.elements += numel - padded
            for piece, storage in storages:
                found.dtypes.add(piece.dtype)
                found.devices.add(piece.device.type)
                if storage.nbytes():  # frameworks resize storages of offloaded tensors to 0
                    found.bytes += (piece.numel() - padded) * piece.element_size()
                self._add(piece, storage, found)
        for tensor in more:
            for piece, storage in self._storages(tensor):
                self._add(piece, storage, found)
        return found

    def _add(self, tensor: torch.Tensor, storage: Any, found: Measured) -> None:
        if storage._cdata not in self._counted:
            self._counted.add(storage._cdata)
            size = 0 if tensor.device.type == "meta" else storage.nbytes()
            found.allocated += size
            if tensor.device.type == "cpu":
                self.host += size


@dataclass
class Measured:
    """The measured size of one component, such as ``exp_avg``.

    Attributes:
        bytes: size of the elements, without padding.
        allocated: size of the storages.
        elements: number of elements.
        dtypes: dtypes of the tensors.
        devices: device types of the tensors.
    """

    bytes: int = 0
    allocated: int = 0
    elements: int = 0
    dtypes: set[torch.dtype] = field(default_factory=set)
    devices: set[str] = field(default_factory=set)


def measure(readings: Sequence[Reading]) -> tuple[list[dict[str, Measured]], int]:
    """Count the tensors of all ``Reading`` objects; a shared storage counts once.

    Returns:
        ``measure`` returns the components of each ``Reading``, and the bytes allocated on the host.
    """
    counter = Counter()
    found: list[dict[str, Measured]] = [{} for _ in readings]
    # The outer loop is over components: a storage that two components share counts for the first
    # component.
    for component in COMPONENTS:
        counter.next_component()
        for reading, counts in zip(readings, found, strict=True):
            counts[component] = counter.count(*_tensors(reading, component), reading.padding)
    return found, counter.host


def _tensors(
    reading: Reading, component: str
) -> tuple[Iterable[torch.Tensor], Iterable[torch.Tensor]]:
    owned = reading.owned
    of_model: dict[str, tuple[Iterable[torch.Tensor], Iterable[torch.Tensor]]] = {
        "params": (reading.trainable, reading.also_params),
        "frozen": (reading.frozen, ()),
        "grad_buckets": (reading.bucket_views, reading.buckets),
        "grad_copies": (reading.gradients, ()),
    }
    if component in of_model:
        return of_model[component]
    if component == "master":
        return (tensor for state in owned for tensor in state.masters), ()
    if component == "other":
        return (*(tensor for state in owned for tensor in state.other), *reading.other), ()
    states = (getattr(state, component) for state in owned)
    return (tensor for tensor in states if tensor is not None), ()


def component_of(reading: Reading, name: str, found: Measured, covered: int) -> AuditComponent:
    """Make the ``AuditComponent`` for one component of a ``Reading``.

    Args:
        reading: the reading of the model and its optimizer.
        name: the component's name.
        found: the component's size, from ``measure``.
        covered: number of parameters by which the bytes are divided for ``bytes_per_parameter``.
    """
    later = reading.later(name) if name in ("master", "exp_avg", "exp_avg_sq") else set()
    copies = (
        name == "grad_copies"
        and reading.copies_later
        and not found.elements
        and any(not state.has_state for state in reading.owned)
    )
    if later or (name == "other" and reading.states_unknown):
        state = "later"
    elif found.elements or found.allocated:
        state = "live"
    else:
        state = "later" if copies else "none"
    shown = sorted(found.devices)
    return AuditComponent(
        dtypes=tuple(sorted(map(name_of, found.dtypes | later))),
        bytes=found.bytes,
        allocated=found.allocated,
        bytes_per_parameter=found.bytes / covered if covered else 0.0,
        sharded=is_sharded(reading, name) and state != "none",
        device="+".join(shown),
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
