"""Count the bytes of parameters, gradients and states of known dtypes, per GPU."""

from __future__ import annotations

from dataclasses import dataclass

from ..precision import names
from .record import Held, Part

SIZES = names.SIZES
"""Maps a dtype's canonical name to the bytes of an element."""


@dataclass(frozen=True)
class Precision:
    """The canonical dtype names of a model and its optimizer; ``""`` for missing tensors.

    Attributes:
        params: dtype of the parameters.
        gradients: dtype of the gradients between the backward pass and the step.
        master: dtype of the masters.
        exp_avg: dtype of the first moment.
        exp_avg_sq: dtype of the second moment.
        buckets: whether the gradients are in the model's unsharded buckets.
        copies: whether the step makes fp32 copies of the owned gradients.
        unpacks: the moments that the step converts to fp32, a whole parameter group at a time.
        offloaded: share of the optimizer states in the host's memory, from 0 to 1.
        offload_keeps_master: whether the GPU keeps a copy of the fp32 masters that are on the host.
    """

    params: str
    gradients: str = ""
    master: str = ""
    exp_avg: str = ""
    exp_avg_sq: str = ""
    buckets: bool = True
    copies: bool = False
    unpacks: tuple[str, ...] = ()
    offloaded: float = 0.0
    offload_keeps_master: bool = True


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


def mean(total: int, ranks: int) -> int:
    """Return a total divided by the number of ranks, rounded up."""
    return -(-total // ranks)


def part(name: str, share: Share, precision: Precision, optimizer: str) -> Part:
    """Count the memory that the parameters of one data-parallel group need.

    Args:
        name: the part's name.
        share: the parameters.
        precision: the dtypes.
        optimizer: the optimizer's name; empty for a model that is not trained.
    """
    held = {}
    held["params"] = _held(share, share.trainable, precision.params, share.params_sharded)
    held["frozen"] = _held(share, share.frozen, precision.params, share.params_sharded)
    sharded_grads = share.states_sharded and not precision.buckets
    kind = "grad_buckets" if precision.buckets else "grad_copies"
    held[kind] = _held(share, share.trainable, precision.gradients, sharded_grads)
    for component in ("master", "exp_avg", "exp_avg_sq"):
        dtype = getattr(precision, component)
        held[component] = _held(share, share.trainable, dtype, share.states_sharded)
    if precision.offloaded:
        held = _offload(share, precision, held)
    owned = mean(share.trainable, share.group) if share.states_sharded else share.trainable
    return Part(
        name,
        optimizer,
        share.group,
        share.groups,
        share.trainable,
        owned if optimizer else 0,
        {key: size for key, size in held.items() if size.group_bytes},
        _at_step(share, precision),
    )


def _held(share: Share, numel: int, dtype: str, sharded: bool) -> Held:
    size = SIZES[dtype] if dtype else 0
    if not numel or not size:
        return Held()
    total = numel * size * (1 if sharded else share.group)
    return Held((dtype,), mean(total, share.group), total, 0, float(size), sharded)


def _at_step(share: Share, precision: Precision) -> dict[str, Held]:
    sizes = {}
    if precision.copies:
        sizes["grad_copies"] = _held(share, share.trainable, "fp32", share.states_sharded)
    if precision.unpacks:
        state = _held(share, share.trainable, "fp32", share.states_sharded)
        number = len(precision.unpacks)
        sizes["unpacked"] = Held(
            ("fp32",),
            state.bytes * number,
            state.group_bytes * number,
            0,
            4.0 * number,
            state.sharded,
        )
    return {key: size for key, size in sizes.items() if size.group_bytes}


def _offload(share: Share, precision: Precision, held: dict[str, Held]) -> dict[str, Held]:
    """Move a share of the states to the host's memory, and add host copies of their gradients.

    For each offloaded parameter, Megatron's HybridDeviceOptimizer stores master, gradient and two
    moments on the host, all in fp32. The states that stay on the GPU are unchanged.
    """
    gone = round(share.trainable * precision.offloaded)
    moved = Share(gone, group=share.group, states_sharded=share.states_sharded)
    there = _held(moved, gone, "fp32", share.states_sharded)
    sizes = dict(held)
    for component in ("exp_avg", "exp_avg_sq"):
        sizes[component] = _replace(held[component], share, gone, there, gone)
    kept = 0 if precision.offload_keeps_master else gone
    sizes["master"] = _replace(held["master"], share, kept, there, gone)
    sizes["grad_copies"] = Held(("fp32",), there.bytes, there.group_bytes, there.bytes, 4.0, True)
    return sizes


def _replace(held: Held, share: Share, left: int, there: Held, gone: int) -> Held:
    """Return ``held`` without ``left`` parameters on the GPU, and with ``there`` on the host."""
    numel = share.trainable or 1
    stays = held.group_bytes * (numel - left) // numel
    total = stays + there.group_bytes
    dtypes = tuple(sorted({*(held.dtypes if stays else ()), *(there.dtypes if gone else ())}))
    on_gpu = mean(stays, share.group)
    return Held(
        dtypes,
        on_gpu + there.bytes,
        total,
        there.bytes,
        total / (numel * (1 if held.sharded or share.states_sharded else share.group)),
        held.sharded or there.sharded,
    )


def ring(part_: Part, component: str) -> int:
    """Return the bytes that a rank sends in a ring reduce-scatter or all-gather of a component."""
    held = part_.components.get(component)
    if held is None or part_.data_parallel_size == 1:
        return 0
    whole = held.group_bytes if held.sharded else held.group_bytes // part_.data_parallel_size
    return whole * (part_.data_parallel_size - 1) // part_.data_parallel_size
