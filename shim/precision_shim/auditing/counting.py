"""What readings hold, in bytes: each storage once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from ..rules.dtypes import name_of
from .reading import Reading, local, plain, unique
from .record import COMPONENTS, AuditComponent


class Counter:
    """Counts every storage once, for the component that shows it first."""

    def __init__(self) -> None:
        self._counted: set[int] = set()
        self._before: set[int] = set()
        self.host = 0

    def next_component(self) -> None:
        """What was counted so far belongs to other components."""
        self._before = set(self._counted)

    def _is_new(self, tensor: torch.Tensor) -> bool:
        return all(one.untyped_storage()._cdata not in self._before for one in plain(tensor))

    def count(self, tensors: Iterable[torch.Tensor], more: Iterable[torch.Tensor] = ()) -> Measured:
        """Count tensors whose storages are new.

        Args:
            tensors: those whose numbers count.
            more: those of which only the storages count, padding and all.
        """
        found = Measured()
        for tensor in unique(tensors):
            if not local(tensor).numel() or not self._is_new(tensor):
                continue
            found.elements += local(tensor).numel()
            for one in plain(tensor):
                found.dtypes.add(one.dtype)
                found.devices.add(one.device.type)
                if one.untyped_storage().nbytes():  # frameworks empty storages while they offload
                    found.bytes += one.numel() * one.element_size()
                self._add(one, found)
        for tensor in more:
            for one in plain(tensor):
                self._add(one, found)
        return found

    def _add(self, tensor: torch.Tensor, found: Measured) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._counted:
            self._counted.add(storage._cdata)
            size = storage.nbytes()
            found.allocated += size
            if tensor.device.type == "cpu":
                self.host += size


@dataclass
class Measured:
    """What a component holds.

    Attributes:
        bytes: of the numbers.
        allocated: of the storages.
        elements: how many numbers.
        dtypes: theirs.
        devices: kinds of device.
    """

    bytes: int = 0
    allocated: int = 0
    elements: int = 0
    dtypes: set[torch.dtype] = field(default_factory=set)
    devices: set[str] = field(default_factory=set)


def measure(readings: Sequence[Reading]) -> tuple[list[dict[str, Measured]], int]:
    """Count what readings hold, each storage once over all of them.

    Returns:
        For each reading its components, and how many of the bytes are in the host's memory.
    """
    counter = Counter()
    found: list[dict[str, Measured]] = [{} for _ in readings]
    # Component by component, so that a storage that two parts share goes to the first kind.
    for component in COMPONENTS:
        counter.next_component()
        for reading, counts in zip(readings, found, strict=True):
            counts[component] = counter.count(*_tensors(reading, component))
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
        return (tensor for one in owned for tensor in one.masters), ()
    if component == "other":
        return (*(tensor for one in owned for tensor in one.other), *reading.other), ()
    return (state for one in owned if (state := getattr(one, component)) is not None), ()


def component_of(reading: Reading, name: str, found: Measured) -> AuditComponent:
    """A component as an audit shows it."""
    later = reading.later(name) if name in ("master", "exp_avg", "exp_avg_sq") else set()
    waits = any(not one.has_state for one in reading.owned)
    copies = name == "grad_copies" and reading.copies_later and waits and not found.elements
    if later:
        state = "later"
    elif found.elements or found.allocated:
        state = "live"
    else:
        state = "later" if copies else "none"
    covered = (
        reading.parameters
        if name in ("params", "frozen", "grad_buckets")
        else reading.owned_parameters
    )
    shown = sorted(found.devices)
    return AuditComponent(
        dtypes=tuple(sorted(map(name_of, found.dtypes | later))),
        bytes=found.bytes,
        allocated=found.allocated,
        bytes_per_parameter=found.bytes / covered if covered else 0.0,
        sharded=_sharded(reading, name) and state != "none",
        device="+".join(shown),
        state=state,
    )


def _sharded(reading: Reading, name: str) -> bool:
    if name in ("params", "frozen", "grad_buckets"):
        return reading.params_sharded and name != "grad_buckets"
    return reading.sharded
