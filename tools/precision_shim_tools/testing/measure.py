"""Count the bytes of a training process's live tensors.

The bytes of each kind of tensor equal the sum over all optimizers in ``precision_shim.audit``. If
two kinds share a torch storage, its bytes count once, for the kind that is first in ``COMPONENTS``,
so the total over all kinds is the memory that the tensors occupy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from precision_shim.auditing.counting import is_sharded, measure
from precision_shim.auditing.readers import read_optimizers
from precision_shim.auditing.record import COMPONENTS, OF_MODEL, PER_PARAMETER

__all__ = ["MeasuredBytes", "Part", "measure_bytes"]


@dataclass(frozen=True)
class Part:
    """The size of one kind of tensor on this rank.

    Attributes:
        nbytes: bytes of the storages, padding included.
        elements: number of elements that belong to parameters, padding excluded.
        bytes_per_parameter: bytes of the elements, without padding, per trainable parameter of this
            rank's model (``params``, ``frozen``, ``grad_buckets``) or per parameter that this
            rank's optimizer owns (all other kinds); 0.0 without parameters.
        dtypes: names of the dtypes, sorted, such as ``("bfloat16",)``.
        sharded: whether each rank of the data-parallel group stores only a shard.
    """

    nbytes: int
    elements: int
    bytes_per_parameter: float
    dtypes: tuple[str, ...]
    sharded: bool


@dataclass(frozen=True)
class MeasuredBytes:
    """The result of :func:`measure_bytes` on this rank.

    Attributes:
        params: trainable parameters of the model (replicated on all data-parallel ranks).
        frozen: parameters without gradient (replicated).
        grad_buckets: gradient buckets of Megatron's DDP (replicated).
        grad_copies: ``.grad`` and the fp32 copies that ``step()`` makes of a 16-bit bucket (sharded
            like the optimizer); measure them between ``step()`` and ``zero_grad()``.
        master: fp32 or fp16 master parameters, or only their low 16 bits as int16 (sharded).
        exp_avg: first moments (sharded).
        exp_avg_sq: second moments (sharded).
        other: scales, step counts, the model's buffers and other tensors of the optimizer.
        trainable: number of trainable parameters of this rank's model.
        owned: number of parameters whose states this rank's optimizer stores.
        data_parallel_sizes: for each optimizer (``"model"``, or ``"dense"`` and ``"experts"``), the
            number of ranks that share its states.
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
    data_parallel_sizes: Mapping[str, int]

    @property
    def data_parallel_size(self) -> int:
        """The first entry of ``data_parallel_sizes``."""
        return next(iter(self.data_parallel_sizes.values()))

    @property
    def parts(self) -> dict[str, Part]:
        """The ``Part`` of each kind of tensor, by name, in the order of ``COMPONENTS``."""
        return {name: getattr(self, name) for name in COMPONENTS}

    @property
    def total(self) -> int:
        """Bytes of all kinds of tensors on this rank, padding included."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def per_parameter(self) -> float:
        """Bytes per trainable parameter at data-parallel size 1, without padding.

        ``frozen`` and ``other`` are left out: they do not grow with the trainable parameters.
        """
        return sum(self.parts[name].bytes_per_parameter for name in PER_PARAMETER)

    def __str__(self) -> str:
        lines = [
            f"{name}: {'+'.join(part.dtypes)}, {part.nbytes:,} bytes, "
            f"{part.bytes_per_parameter:.2f} per parameter"
            for name, part in self.parts.items()
            if part.nbytes
        ]
        total = f"total: {self.total:,} bytes, {self.per_parameter:.2f} per parameter"
        return "\n".join([*lines, total])


def measure_bytes(model_chunks: Any, optimizer: Any) -> MeasuredBytes:
    """Count the bytes of model, gradients and optimizer state from the live tensors.

    Model and optimizer can have any form that ``precision_shim.audit`` accepts; an optimizer of
    ``None`` counts the model only. Optimizer states exist only after the first step.

    Measured on megatron-core 0.16.1 in 2026-11, a bf16 model has 18 bytes per parameter by default;
    with bf16 main gradients and moments 12, or 10 with int16 remainders as masters.
    """
    readings = read_optimizers(model_chunks, optimizer)
    measured = measure(readings)
    trainable = sum(reading.parameters for reading in readings)
    owned = sum(reading.owned_parameters for reading in readings)

    def part(name: str) -> Part:
        counts = [figures[name] for figures in measured]
        covered = trainable if name in OF_MODEL else owned
        dtypes = {dtype for count in counts for dtype in count.dtypes}
        return Part(
            nbytes=sum(count.allocated for count in counts),
            elements=sum(count.elements for count in counts),
            bytes_per_parameter=sum(count.bytes for count in counts) / covered if covered else 0.0,
            dtypes=tuple(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)),
            sharded=any(is_sharded(reading, name) for reading in readings),
        )

    return MeasuredBytes(
        **{name: part(name) for name in COMPONENTS},
        trainable=trainable,
        owned=owned,
        data_parallel_sizes={
            reading.name: reading.shards or reading.data_parallel_size for reading in readings
        },
    )
