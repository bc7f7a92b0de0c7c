"""Check the values of an optimizer's and an engine's section that verl passes on without a check.

The plan checks only keys that a section has, because verl's older versions lack some of the keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator

import torch

from precision_shim.adapting import versioned
from precision_shim.planning.record import Problem, no_number

from ..fp16.legality import of_arguments, of_class, of_reshard, of_wrap_policy
from ..megatron.deciding.numbers import STYLES
from .sections import Section

_ON_FSDP = ("fsdp", "fsdp2", "fsdp_turbo")
_SCHEDULES = ("constant", "cosine")
_INCREASES = ("constant", "linear", "cosine")


def problems(role: Section, unresolved: Collection[str]) -> Iterator[Problem]:
    """Yield a problem for each value that makes verl's worker fail.

    Args:
        role: the sections of a model that is trained.
        unresolved: the keys that cannot be resolved on this machine, and are ``None``.
    """
    if role.strategy == "megatron":
        found = _on_megatron(role)
    elif role.strategy in _ON_FSDP:
        found = _on_fsdp(role)
    else:
        return
    yield from (problem for problem in found if problem.key not in unresolved)


def _no_numbers(role: Section, names: Collection[str], *, null: bool = False) -> Iterator[Problem]:
    for name in names:
        value = role.optim.get(name, 0)
        if not isinstance(value, int | float) and not (null and value is None):
            yield no_number(value, role.at.subject, f"{role.optim_key}.{name}")


def _not_among(role: Section, name: str, allowed: Collection[str]) -> Iterator[Problem]:
    value = role.optim.get(name, next(iter(allowed)))
    if value not in allowed:
        fault = f"{value!r} is not known; allowed: {', '.join(allowed)}"
        key = f"{role.optim_key}.{name}"
        yield Problem("number", role.at.subject, key, fault, "Write one of them.")


def _on_megatron(role: Section) -> Iterator[Problem]:
    """Yield a problem for each value that Megatron's scheduler or clipping refuses."""
    optim = role.optim
    over = "clip_grad" in (optim.get("override_optimizer_config") or {})
    yield from _no_numbers(role, ("lr", "min_lr", "lr_warmup_init", "weight_decay"))
    yield from _no_numbers(role, () if over else ("clip_grad",))
    steps = ("lr_warmup_steps", "lr_decay_steps", "lr_warmup_steps_ratio")
    yield from _no_numbers(role, steps, null=True)
    for name in ("lr", "weight_decay"):
        value = optim.get(name, 0)
        if isinstance(value, int | float) and value < 0:
            key, fault = f"{role.optim_key}.{name}", f"{value} is below 0"
            yield Problem("number", role.at.subject, key, fault, "Write 0 or more.")
    yield from _not_among(role, "lr_decay_style", STYLES)
    yield from _not_among(role, "weight_decay_incr_style", _INCREASES)


def _on_fsdp(role: Section) -> Iterator[Problem]:
    """Yield a problem for each value that torch's optimizer, verl's scheduler or FSDP refuses."""
    optim = role.optim
    name, place = optim.get("optimizer", "AdamW"), optim.get("optimizer_impl", "torch.optim")
    keys = f"{role.optim_key}.optimizer_impl", f"{role.optim_key}.optimizer"
    for key, value in zip(keys, (place, name), strict=True):
        if not value:
            fault, remedy = f"{value!r} names no optimizer", "Write a name, or leave it out."
            yield Problem("key", role.at.subject, key, fault, remedy)
    if place and name and place != "torch.optim":
        yield from of_class(str(place), str(name), keys, role.at.subject, versioned("verl"))
    if place == "torch.optim" and inspect.isclass(getattr(torch.optim, str(name), None)):
        passed = {key: optim[key] for key in ("lr", "weight_decay", "betas") if key in optim}
        yield from of_arguments(str(name), passed, f"{role.optim_key}.{{}}", role.at.subject)
    yield from _no_numbers(role, ("lr_warmup_steps",))
    warm = optim.get("lr_warmup_steps", -1)
    if isinstance(warm, int | float) and warm <= 0:
        yield from _no_numbers(role, ("lr_warmup_steps_ratio",))
    if optim.get("warmup_style") is None:
        yield from _not_among(role, "lr_scheduler_type", _SCHEDULES)
    else:
        yield from _not_among(role, "warmup_style", _SCHEDULES)
    yield from _sharded(role)


def _sharded(role: Section) -> Iterator[Problem]:
    engine, key = role.engine, role.engine_key
    shards = engine.get("fsdp_size", -1)
    if shards is None or shards == 0:
        fault = f"{shards!r}: verl divides the GPUs by it"
        yield Problem("size", role.at.subject, f"{key}.fsdp_size", fault, "Write -1 for all.")
    elif isinstance(shards, int) and role.strategy != "fsdp":
        ranks = shards if 0 < shards < role.at.world else role.at.world
        reshard = f"{key}.reshard_after_forward"
        value = engine.get("reshard_after_forward")
        yield from of_reshard(value, reshard, role.at.subject, ranks)
    if "wrap_policy" in engine:
        yield from of_wrap_policy(engine["wrap_policy"], f"{key}.wrap_policy", role.at.subject)
