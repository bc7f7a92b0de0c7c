"""What a training process really holds, counted from its live tensors.

Nothing here is computed from a config. A storage that two parts share is counted once, for
the first part in the order below, so that the total is what the allocator sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

__all__ = ["MeasuredBytes", "Part", "measure_bytes"]


@dataclass(frozen=True)
class Part:
    """One kind of tensor on this rank.

    Attributes:
        nbytes: bytes of the storages, padding included.
        elements: numbers that belong to parameters, padding excluded.
        bytes_per_parameter: bytes of those numbers by the parameters they belong to: for a
            replicated part all trainable parameters of this rank's model, for a sharded
            one those that this rank's optimizer owns. 0.0 where there are none.
        dtypes: names of the dtypes, sorted: ``("bfloat16",)``.
        sharded: whether each rank of the data-parallel group holds a share only.
    """

    nbytes: int
    elements: int
    bytes_per_parameter: float
    dtypes: tuple[str, ...]
    sharded: bool


@dataclass(frozen=True)
class MeasuredBytes:
    """What :func:`measure_bytes` found on this rank.

    Attributes:
        params: trainable parameters of the model (replicated over data parallelism).
        frozen: parameters without gradient (replicated).
        grad_buckets: gradient buffers of Megatron's DDP (replicated).
        grad_copies: gradients that live beside the buckets: the fp32 copies that an
            optimizer step makes of a 16-bit bucket, and ``.grad`` of the model
            (sharded where the optimizer is). Measure between ``step()`` and
            ``zero_grad()`` to see them.
        master: fp32 or fp16 master parameters, or int16 remainders (sharded).
        exp_avg: first moments (sharded).
        exp_avg_sq: second moments (sharded).
        other: scales and other tensors of the optimizer's state (sharded).
        trainable: number of trainable parameters of this rank's model.
        owned: number of those whose states this rank's optimizer holds.
        data_parallel_size: ranks that share the sharded parts.
    """

    params: Part
    frozen: Part
    grad_buckets: Part
    grad_copies: Part
    master: Part
    exp_avg: Part
    exp_avg_sq: Part
    other: Part
    trainable: int
    owned: int
    data_parallel_size: int

    @property
    def parts(self) -> dict[str, Part]:
        """The parts by name, in the order in which storages are counted."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.type == "Part"}

    @property
    def total(self) -> int:
        """Bytes of all parts on this rank, padding included."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def per_parameter(self) -> float:
        """Bytes per trainable parameter without data parallelism, padding excluded.

        Replicated and sharded parts are each divided by the parameters they cover, so the
        figure does not depend on the data-parallel size. ``frozen`` and ``other`` are left
        out: neither grows with the trainable parameters.
        """
        counted = (
            self.params,
            self.grad_buckets,
            self.grad_copies,
            self.master,
            self.exp_avg,
            self.exp_avg_sq,
        )
        return sum(part.bytes_per_parameter for part in counted)

    def __str__(self) -> str:
        lines = [
            f"{'part':<13}{'dtypes':<20}{'bytes':>12}{'B/param':>9}  held",
        ]
        for name, part in self.parts.items():
            if part.nbytes:
                held = f"1/{self.data_parallel_size}" if part.sharded else "whole"
                lines.append(
                    f"{name:<13}{'+'.join(part.dtypes):<20}{part.nbytes:>12,}"
                    f"{part.bytes_per_parameter:>9.2f}  {held}"
                )
        lines.append(f"{'total':<33}{self.total:>12,}{self.per_parameter:>9.2f}")
        return "\n".join(lines)


def measure_bytes(model_chunks: Any, optimizer: Any) -> MeasuredBytes:
    """Count the bytes of model, gradients and optimizer state from the live tensors.

    Takes Megatron's DDP chunks with its ``DistributedOptimizer`` (or a ``ChainedOptimizer``,
    or a mixed-precision optimizer without sharding), as well as a plain module with a torch
    optimizer. Optimizer states exist only after the first step.

    With megatron-core at data-parallel size 1 and a bf16 model this gives 18 bytes per
    parameter with Megatron's defaults; 10 with bf16 main gradients, moments and int16
    remainders; 12 without the remainders (measured with megatron-core 0.16.1, 2026-11).

    Args:
        model_chunks: a module or a list of modules, as ``get_megatron_optimizer`` takes them.
        optimizer: the optimizer over them; None counts the model only.

    Returns:
        :class:`MeasuredBytes` for this rank.
    """
    chunks = _as_list(model_chunks)
    inner = list(_inner_optimizers(optimizer))
    counter = _Counter()

    params = _unique(p for chunk in chunks for p in chunk.parameters())
    trainable = [p for p in params if p.requires_grad]
    optimized = _unique(p for o in inner for g in o.param_groups for p in g["params"])
    states: dict[str, list[torch.Tensor]] = {"master": [], "exp_avg": [], "exp_avg_sq": []}
    other: list[torch.Tensor] = []
    for one in inner:
        for state in one.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    part = "master" if name == "master_param" else name
                    states.get(part, other).append(value)
        for scales in getattr(one, "_scales", {}).values():
            other.extend(scales.values())

    n_trainable = sum(p.numel() for p in trainable)
    n_owned = sum(p.numel() for p in optimized)
    sharded = n_owned < n_trainable
    part_of_params = counter.part(trainable, n_trainable, False)
    frozen = counter.part([p for p in params if not p.requires_grad], n_trainable, False)
    buckets, bucket_views = _grad_buckets(chunks)
    grad_buckets = counter.part(bucket_views, n_trainable, False, buckets)
    # Without the precision-aware optimizer its parameters are the masters.
    held = counter.seen(trainable)
    masters = states["master"] + [p for p in optimized if _storage_key(p) not in held]
    gradients = [
        grad
        for p in _unique([*trainable, *optimized])
        for grad in (p.grad, getattr(p, "decoupled_grad", None))
        if grad is not None
    ]
    return MeasuredBytes(
        params=part_of_params,
        frozen=frozen,
        grad_buckets=grad_buckets,
        grad_copies=counter.part(gradients, n_owned, sharded),
        master=counter.part(masters, n_owned, sharded),
        exp_avg=counter.part(states["exp_avg"], n_owned, sharded),
        exp_avg_sq=counter.part(states["exp_avg_sq"], n_owned, sharded),
        other=counter.part(other, n_owned, sharded),
        trainable=n_trainable,
        owned=n_owned,
        data_parallel_size=_data_parallel_size(optimizer),
    )


class _Counter:
    """Counts every storage once."""

    def __init__(self) -> None:
        self._counted: set[tuple[str, int]] = set()

    def seen(self, tensors: Iterable[torch.Tensor]) -> set[tuple[str, int]]:
        return {_storage_key(t) for t in tensors}

    def part(
        self,
        tensors: Sequence[torch.Tensor],
        covered: int,
        sharded: bool,
        storages_of: Sequence[torch.Tensor] | None = None,
    ) -> Part:
        """A part made of ``tensors``, in the storages of ``storages_of`` (default: theirs)."""
        fresh = [t for t in tensors if t.numel() and _storage_key(t) not in self._counted]
        nbytes = 0
        for tensor in [*fresh, *(storages_of or ())]:
            for plain in _plain_tensors(tensor):
                key = _storage_key(plain)
                if key not in self._counted and plain.numel():
                    self._counted.add(key)
                    nbytes += plain.untyped_storage().nbytes()
        held = [plain for tensor in fresh for plain in _plain_tensors(tensor)]
        used = sum(plain.numel() * plain.element_size() for plain in held)
        return Part(
            nbytes=nbytes,
            elements=sum(t.numel() for t in fresh),
            bytes_per_parameter=used / covered if covered else 0.0,
            dtypes=tuple(sorted({str(plain.dtype)[6:] for plain in held})),
            sharded=sharded,
        )


def _plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that hold the bytes: TransformerEngine's fp8 tensors are wrappers."""
    wrapped = [getattr(tensor, name, None) for name in ("_data", "_transpose", "_scale_inv")]
    found = [t for t in wrapped if isinstance(t, torch.Tensor)]
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and found:
        yield from found
    else:
        yield tensor


def _storage_key(tensor: torch.Tensor) -> tuple[str, int]:
    plain = next(_plain_tensors(tensor))
    return str(plain.device), plain.untyped_storage().data_ptr()


def _grad_buckets(chunks: Sequence[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Whole buffers, and in them the views that belong to parameters."""
    buffers: list[torch.Tensor] = []
    for chunk in chunks:
        for name in ("buffers", "expert_parallel_buffers"):
            found = getattr(chunk, name, None)
            # torch's Module.buffers is a method; Megatron's DDP hides it behind a list.
            if isinstance(found, (list, tuple)):
                buffers.extend(b.grad_data for b in found if b.grad_data is not None)
    views = [
        grad
        for chunk in chunks
        for p in chunk.parameters()
        if (grad := getattr(p, "main_grad", None)) is not None
    ]
    return buffers, views


def _inner_optimizers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    if optimizer is None:
        return
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None:
        for one in chained:
            yield from _inner_optimizers(one)
    elif isinstance(optimizer, torch.optim.Optimizer):
        yield optimizer
    else:
        # Megatron's wrappers; a stub over a frozen model has no optimizer inside.
        yield from _inner_optimizers(getattr(optimizer, "optimizer", None))


def _data_parallel_size(optimizer: Any) -> int:
    for one in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        group = getattr(one, "data_parallel_group", None)
        if group is not None:
            return int(group.size())
    return 1


def _as_list(model_chunks: Any) -> list[Any]:
    if isinstance(model_chunks, (list, tuple, torch.nn.ModuleList)):
        return list(model_chunks)
    return [model_chunks]


def _unique(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(t): t for t in tensors}.values())
