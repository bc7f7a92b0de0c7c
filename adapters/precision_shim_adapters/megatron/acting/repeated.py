"""Record what a step did with its gradients, so that the step can be repeated after an exception.

Megatron's ``prepare_grads`` unscales gradients in place and updates the loss scaler. If an
exception ends a step, a trainer may call ``step`` again with the same gradients. In a repeated
step, ``prepare_once`` and ``forget_used`` in ``overflow`` must not unscale, count or step a second
time. The exception may come on one rank, while other ranks complete their step. A rank that repeats
the step must call the same collectives as the other ranks.

Each rank therefore counts its gradient syncs. If a rank has synced no gradients since the last
step, the next step repeats the last step. A model without Megatron's DDP or FSDP has no gradient
syncs; its next step repeats the last step if the trainer has not scaled a new loss.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from precision_shim.adapting import Call, seam, warn

from ..deciding.requested import SCALING
from .build import megatron_label
from .scaled import forget_asked, is_asked, sees_losses

_REPEATS = "megatron-repeats"
PATHS = {_REPEATS: "Megatron (repeated steps)"}
"""Maps the group of these seams to its name for users."""

_HERE: dict[str, Any] = {
    "feature": SCALING,
    "group": _REPEATS,
    "optional": True,
    "delete_when": "Megatron's step() can be repeated after an exception",
}
_OPTIMIZER = "megatron.core.optimizer.optimizer"
_FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp"


@dataclass(eq=False)
class Answer:
    """The result of an optimizer's ``prepare_grads``.

    Attributes:
        found: whether ``prepare_grads`` found an overflow.
        parts: the ``Answer``s of a chain's optimizers.
        before: the first scaler's state before ``prepare_grads``.
        after: the first scaler's scale after ``prepare_grads``.
        number: the number of gradient syncs before ``prepare_grads``.
        interrupted: whether an exception ended the step.
        used: whether the optimizer has stepped.
        put_back: whether the state ``before`` was restored; a repeated step updates the scaler.
    """

    found: bool
    parts: list[Answer | None]
    before: dict[str, Any]
    after: torch.Tensor
    number: int
    interrupted: bool = False
    used: bool = False
    put_back: bool = False


@dataclass(eq=False)
class _Unscaled:
    """The gradients of a ``prepare_grads`` that an exception ended, or that still runs.

    Attributes:
        next: gradients that Megatron unscales next.
        done: gradients that Megatron has unscaled.
        number: the number of gradient syncs before ``prepare_grads``.
    """

    next: list[torch.Tensor]
    done: list[torch.Tensor]
    number: int


answers: weakref.WeakKeyDictionary[Any, Answer] = weakref.WeakKeyDictionary()
"""Maps an optimizer to the ``Answer`` for its latest gradients: ``prepare_once`` writes entries,
``forget`` deletes them."""

_unscaled: weakref.WeakKeyDictionary[Any, _Unscaled] = weakref.WeakKeyDictionary()
"""Maps an optimizer to its ``_Unscaled``: ``unscale_once`` writes entries."""

_uneven: weakref.WeakSet[Any] = weakref.WeakSet()
"""Optimizers of chains in which an exception came after only some scalers were updated."""

_syncs: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Counts the gradient syncs of each DDP: ``note_gradients`` writes entries."""


def unchain(optimizer: Any) -> list[Any]:
    """The optimizers chained in an optimizer, or the optimizer itself."""
    if not hasattr(optimizer, "chained_optimizers"):
        return [optimizer]
    return [leaf for inner in optimizer.chained_optimizers for leaf in unchain(inner)]


@seam(
    at=[
        "megatron.core.distributed.distributed_data_parallel:"
        "DistributedDataParallel.finish_grad_sync",
        f"{_FSDP}:MegatronFSDP.finish_grad_sync",
    ],
    why="every stage of a pipeline calls it for each batch, and no repeated step does",
    **_HERE,
)
def note_gradients(call: Call) -> Any:
    """Count a gradient sync."""
    _syncs[call.instance] = _syncs.get(call.instance, 0) + 1
    return call.proceed()


def syncs_of(optimizer: Any) -> int:
    """Count the gradient syncs of an optimizer's model; if the model is unknown, of all models."""
    chunks = getattr(optimizer, "model_chunks", None)
    if not chunks:
        return sum(_syncs.values())
    # With Megatron-FSDP, a chunk is a wrapper; ``note_gradients`` counts the syncs of its module.
    return sum(
        _syncs.get(one, 0) for chunk in chunks for one in (chunk, getattr(chunk, "module", None))
    )


def _are_many() -> bool:
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def is_stale(optimizer: Any) -> bool:
    """Whether an optimizer has new gradients since its ``Answer`` or ``_Unscaled`` was stored."""
    leaves = unchain(optimizer)
    return any(_is_over(leaf, leaves) for leaf in leaves)


def _is_over(leaf: Any, leaves: list[Any]) -> bool:
    number, answer, unscaled = syncs_of(leaf), answers.get(leaf), _unscaled.get(leaf)
    if any(known is not None and known.number != number for known in (answer, unscaled)):
        return True
    stopped = unscaled is not None or (answer is not None and answer.interrupted)
    if number == 0 and stopped and is_asked(leaves):
        return True
    completed = answer is not None and answer.used and not answer.interrupted
    return completed and (number == 0 or not _are_many())


def is_repeated(optimizer: Any) -> bool:
    """Whether an exception ended a step of an optimizer, and its gradients are still the same."""
    return any(
        leaf in _unscaled or (leaf in answers and answers[leaf].interrupted)
        for leaf in unchain(optimizer)
    )


def forget(optimizer: Any) -> None:
    """Delete the ``Answer`` and ``_Unscaled`` of an optimizer's former gradients.

    On one rank, a step that an exception ended does not count for the growth tracker. With several
    ranks the step counts, because other ranks may have completed it, and all ranks need one scale.
    """
    for inner in unchain(optimizer):  # the ``Answer`` of a chain needs its parts' ``Answer``s
        _unscaled.pop(inner, None)
        answer = answers.pop(inner, None)
        if answer is None or not answer.interrupted or answer.found or _are_many():
            continue
        _put_back(inner, answer)


def _put_back(optimizer: Any, answer: Answer) -> None:
    if optimizer.grad_scaler.scale is answer.after:  # no load has replaced the scale
        optimizer.grad_scaler.load_state_dict(answer.before)
        answer.put_back = True


def interrupt(optimizer: Any) -> None:
    """Mark the records of a step that an exception ended: a trainer may repeat the step."""
    leaves = [leaf for leaf in unchain(optimizer) if _is_dynamic(leaf)]
    prepared = [leaf for leaf in leaves if leaf in answers]
    if prepared or any(leaf in _unscaled for leaf in leaves):
        forget_asked(leaves)
    if 0 < len(prepared) < len(leaves):
        _uneven.update(leaves)
    for leaf in prepared:
        answers[leaf].interrupted = True
    if not sees_losses() and any(syncs_of(leaf) == 0 for leaf in leaves):
        forget(optimizer)


def keep(optimizer: Any, answer: Answer) -> None:
    """Store an ``Answer``; an overflow in a chain counts for each of the chain's optimizers."""
    answers[optimizer] = answer
    _unscaled.pop(optimizer, None)
    for part in answer.parts:
        if part is not None:
            part.interrupted, part.found = False, part.found or answer.found


def finish(optimizer: Any) -> None:
    """Delete the ``Answer`` of a completed step, unless another rank may repeat the step."""
    for leaf in unchain(optimizer):
        if leaf not in answers:
            continue
        answers[leaf].interrupted = False
        if not _are_many() or syncs_of(leaf) == 0:
            del answers[leaf]


def put_back(chain: Any) -> None:
    """Restore the scalers that a chain's ``prepare_grads`` updated before an exception ended it.

    Restoring makes all scalers of the chain equal. ``take_again`` repeats the scalers' updates.
    """
    leaves = unchain(chain)
    if _uneven.intersection(leaves):
        for leaf in leaves:
            if leaf in answers:
                _put_back(leaf, answers[leaf])


def are_uneven(chain: Any) -> bool:
    """Whether an exception came after only some scalers of a chain were updated; then forget it."""
    leaves = unchain(chain)
    uneven = bool(_uneven.intersection(leaves))
    _uneven.difference_update(leaves)
    return uneven


def take_again(optimizer: Any, answer: Answer) -> bool:
    """Return the stored result of ``prepare_grads``; update a restored scaler again."""
    if answer.put_back:
        optimizer.grad_scaler.update(answer.found)
        answer.after, answer.put_back = optimizer.grad_scaler.scale, False
    return answer.found


def tell_used(answer: Answer) -> None:
    """Warn about a step without new gradients, unless an exception ended a step on this rank."""
    if not answer.interrupted:
        warn(
            f"{megatron_label()}: step() was called again without new gradients; this rank has "
            "already stepped with them, and does not step again, because another rank may repeat "
            "a step that an exception ended."
        )


def _is_dynamic(optimizer: Any) -> bool:
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    return isinstance(getattr(optimizer, "grad_scaler", None), DynamicGradScaler)


@seam(
    at=[
        f"{_OPTIMIZER}:Float16OptimizerWithFloat16Params._collect_main_grad_data_for_unscaling",
        "megatron.core.optimizer.distrib_optimizer:"
        "DistributedOptimizer._collect_main_grad_data_for_unscaling",
    ],
    why="the gradients that are unscaled next",
    **_HERE,
)
def unscale_once(call: Call) -> Any:
    """Omit gradients that an interrupted ``prepare_grads`` has already unscaled.

    The result still has the gradients with inf or NaN, so that Megatron finds the overflow again.
    """
    gradients = call.proceed()
    if gradients is None or not _is_dynamic(call.instance):
        return gradients
    number, before = syncs_of(call.instance), _unscaled.get(call.instance)
    done = before.done if before is not None and before.number == number else []
    places = {one.data_ptr() for one in done}
    left = [
        one for one in gradients if one.data_ptr() not in places or not one.isfinite().all().item()
    ]
    _unscaled[call.instance] = _Unscaled(left, done, number)
    return left


@seam(
    at=[
        f"{_OPTIMIZER}:MegatronOptimizer.get_grad_stats_parallel_group",
        "megatron.core.optimizer.distrib_optimizer:"
        "DistributedOptimizer.get_grad_stats_parallel_group",
    ],
    why="Megatron asks for the group after it has unscaled, before it asks the other ranks",
    **_HERE,
)
def note_unscaled(call: Call) -> Any:
    """Record that Megatron has unscaled the gradients from ``unscale_once``."""
    known = _unscaled.get(call.instance)
    if known is not None:
        known.done, known.next = [*known.done, *known.next], []
    return call.proceed()
