"""Count the bytes of parameters, gradients and states of known dtypes, per GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from precision_shim.precision.names import SIZES

from .record import ComponentSize, PlannedPart


@dataclass(frozen=True)
class Precision:
    """The canonical dtype names of a model and its optimizer; ``""`` for missing tensors.

    Attributes:
        gradients: dtype of the gradients between the backward pass and the step.
        buckets: whether the gradients are in the model's unsharded buckets.
        sums: whether each rank keeps fp32 sums of the gradients beside the buckets.
        copies: whether the step makes fp32 copies of the owned gradients.
        offloaded: share of the optimizer states in the host's memory, from 0 to 1.
        quantized: dtype in which a part of the parameters is stored, with as many bytes.
        offload_keeps_master: whether the GPU keeps a copy of the fp32 masters that are on the host.
        frozen: dtype of frozen parameters; empty if it is that of the others.
    """

    params: str
    gradients: str = ""
    master: str = ""
    exp_avg: str = ""
    exp_avg_sq: str = ""
    buckets: bool = True
    sums: bool = False
    copies: bool = False
    offloaded: float = 0.0
    quantized: str = ""
    offload_keeps_master: bool = True
    frozen: str = ""


@dataclass(frozen=True)
class Share:
    """The number of parameters on a rank, and the data-parallel group that may shard them.

    Attributes:
        trainable: number of trainable parameters before sharding.
        frozen: number of frozen parameters before sharding.
        group: number of ranks in the data-parallel group.
        groups: number of data-parallel groups in the pipeline stage.
        params_sharded: whether the parameters are sharded over the group.
        states_sharded: whether gradient copies, masters and moments are sharded over the group.
    """

    trainable: int
    frozen: int = 0
    group: int = 1
    groups: int = 1
    params_sharded: bool = False
    states_sharded: bool = True


def part(name: str, share: Share, precision: Precision, optimizer: str) -> PlannedPart:
    """Count the memory that the parameters of one data-parallel group need.

    For each parameter whose states are in the host's memory, Megatron's HybridDeviceOptimizer
    stores master, gradient and two moments there, all in fp32.
    """
    trainable, sharded = share.trainable, share.states_sharded
    gone = round(trainable * precision.offloaded)
    left = trainable - gone
    masters = trainable if precision.offload_keeps_master else left
    gradients = "grad_buckets" if precision.buckets else "grad_copies"
    times = 1 + SIZES["fp32"] // SIZES[precision.gradients] if precision.sums else 1
    sharded_gradients = sharded and not precision.buckets
    still = precision.frozen or precision.params
    held = {
        "params": _held(share, trainable, precision.params, share.params_sharded),
        "frozen": _held(share, share.frozen, still, share.params_sharded),
        gradients: _held(share, times * trainable, precision.gradients, sharded_gradients),
        "master": _held(share, masters, precision.master, sharded, gone),
        "exp_avg": _held(share, left, precision.exp_avg, sharded, gone),
        "exp_avg_sq": _held(share, left, precision.exp_avg_sq, sharded, gone),
    }
    for key in ("params", "frozen") if precision.quantized else ():
        both = sorted({*held[key].dtypes, precision.quantized})
        held[key] = replace(held[key], dtypes=tuple(both))
    if gone:
        held["grad_copies"] = _held(share, 0, "", sharded, gone)
    copies = _held(share, trainable if precision.copies else 0, "fp32", sharded)
    owned = _mean(trainable, share.group) if sharded else trainable
    return PlannedPart(
        name,
        optimizer,
        share.group,
        share.groups,
        trainable,
        owned if optimizer else 0,
        {key: size for key, size in held.items() if size.group_bytes},
        {"grad_copies": copies} if copies.group_bytes else {},
    )


def _held(share: Share, numel: int, dtype: str, sharded: bool, gone: int = 0) -> ComponentSize:
    """Count ``numel`` elements on the GPU, and ``gone`` fp32 elements in the host's memory."""
    ranks = 1 if sharded else share.group
    here = numel * SIZES[dtype] * ranks if dtype else 0
    there = gone * SIZES["fp32"] * ranks
    dtypes = {name for name, size in ((dtype, here), ("fp32", there)) if size}
    host = _mean(there, share.group)
    total = _mean(here, share.group) + host
    return ComponentSize(tuple(sorted(dtypes)), total, here + there, host, sharded)


def _mean(total: int, ranks: int) -> int:
    """Return a total divided by the number of ranks, rounded up."""
    return -(-total // ranks)
