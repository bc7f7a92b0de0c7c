"""Check the values of an optimizer's and an engine's section that verl passes on without a check.

The plan checks only keys that a section has, because verl's older versions lack some of the keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from precision_shim.adapting import versioned
from precision_shim.planning.record import Problem, no_number
from precision_shim.planning.values import no_section

from ..fp16.legality import of_arguments, of_reshard, of_wrap_policy
from ..megatron.deciding.numbers import STYLES

_ON_FSDP = ("fsdp", "fsdp2", "fsdp_turbo")
_OWN_SECTION = ("megatron", "veomni", "torchtitan")
_SCHEDULES = ("constant", "cosine")
_INCREASES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class Role:
    """A model that is trained.

    Attributes:
        subject: the model's name.
        strategy: the engine's strategy.
        optim: the optimizer's section.
        optim_key: the section's key in the config.
        engine: the engine's section.
        engine_key: the section's key in the config.
        world: number of GPUs.
    """

    subject: str
    strategy: str
    optim: Any
    optim_key: str
    engine: Any
    engine_key: str
    world: int


def engine_of(role: Mapping[str, Any]) -> tuple[str, str, Any]:
    """Return a role's strategy, the key of its engine's section, and the section.

    Two releases of verl moved the critic's FSDP section. A section that is left out is ``{}``.
    """
    strategy, absent = str(role.get("strategy") or "fsdp"), dict[str, Any]()
    names = (strategy,) if strategy in _OWN_SECTION else ("fsdp_config", "fsdp")
    places = {name: role.get(name, absent) for name in names}
    inner = role.get("model")
    if isinstance(inner, Mapping):
        places["model.fsdp_config"] = inner.get("fsdp_config", absent)
    name = next((name for name, section in places.items() if section), names[0])
    return strategy, name, places[name]


def trained(config: Mapping[str, Any], key: str, world: int) -> Role:
    """Read the section of a model that a PPO job trains, such as ``critic``."""
    section: Any = config
    for word in key.split("."):
        section = section.get(word) or {}
    strategy, name, engine = engine_of(section)
    subject, optim = key.rpartition(".")[2], section.get("optim", {})
    return Role(subject, strategy, optim, f"{key}.optim", engine, f"{key}.{name}", world)


def check_sections(role: Role, unresolved: Collection[str]) -> None:
    """Check that the sections have keys.

    Raises:
        PlanError: a section has no keys.
    """
    found = {role.optim_key: role.optim, role.engine_key: role.engine}
    if isinstance(role.optim, Mapping):
        inner = role.optim.get("override_optimizer_config")
        found |= {f"{role.optim_key}.override_optimizer_config": inner} if inner else {}
    for key, section in found.items():
        if not isinstance(section, Mapping) and key not in unresolved:
            raise no_section(section, key, versioned("verl"))


def problems(role: Role, unresolved: Collection[str]) -> Iterator[Problem]:
    """Yield a problem for each value that makes verl's worker fail.

    Args:
        role: the model.
        unresolved: the keys that cannot be resolved on this machine, and are ``None``.
    """
    if role.strategy == "megatron":
        found = _on_megatron(role)
    elif role.strategy in _ON_FSDP:
        found = _on_fsdp(role)
    else:
        return
    yield from (problem for problem in found if problem.key not in unresolved)


def _no_numbers(role: Role, names: Collection[str], *, null: bool = False) -> Iterator[Problem]:
    for name in names:
        value = role.optim.get(name, 0)
        if not isinstance(value, int | float) and not (null and value is None):
            yield no_number(value, role.subject, f"{role.optim_key}.{name}")


def _not_among(role: Role, name: str, allowed: Collection[str]) -> Iterator[Problem]:
    value = role.optim.get(name, next(iter(allowed)))
    if value not in allowed:
        fault = f"{value!r} is not known; allowed: {', '.join(allowed)}"
        key = f"{role.optim_key}.{name}"
        yield Problem("number", role.subject, key, fault, "Write one of them.")


def _on_megatron(role: Role) -> Iterator[Problem]:
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
            yield Problem("number", role.subject, key, fault, "Write 0 or more.")
    yield from _not_among(role, "lr_decay_style", STYLES)
    yield from _not_among(role, "weight_decay_incr_style", _INCREASES)


def _on_fsdp(role: Role) -> Iterator[Problem]:
    """Yield a problem for each value that torch's optimizer, verl's scheduler or FSDP refuses."""
    optim = role.optim
    name, place = optim.get("optimizer", "AdamW"), optim.get("optimizer_impl", "torch.optim")
    for word, value in (("optimizer", name), ("optimizer_impl", place)):
        if value is None:
            key, fault = f"{role.optim_key}.{word}", "None names no optimizer"
            yield Problem("key", role.subject, key, fault, "Write a name, or leave it out.")
    if place == "torch.optim" and inspect.isclass(getattr(torch.optim, str(name), None)):
        passed = {key: optim[key] for key in ("lr", "weight_decay", "betas") if key in optim}
        yield from of_arguments(str(name), passed, f"{role.optim_key}.{{}}", role.subject)
    yield from _no_numbers(role, ("lr_warmup_steps",))
    warm = optim.get("lr_warmup_steps", -1)
    if isinstance(warm, int | float) and warm <= 0:
        yield from _no_numbers(role, ("lr_warmup_steps_ratio",))
    if optim.get("warmup_style") is None:
        yield from _not_among(role, "lr_scheduler_type", _SCHEDULES)
    else:
        yield from _not_among(role, "warmup_style", _SCHEDULES)
    yield from _sharded(role)


def _sharded(role: Role) -> Iterator[Problem]:
    engine, key = role.engine, role.engine_key
    shards = engine.get("fsdp_size", -1)
    if shards is None or shards == 0:
        fault = f"{shards!r}: verl divides the GPUs by it"
        yield Problem("size", role.subject, f"{key}.fsdp_size", fault, "Write -1 for all.")
    elif isinstance(shards, int) and role.strategy != "fsdp":
        ranks = shards if 0 < shards < role.world else role.world
        reshard = f"{key}.reshard_after_forward"
        value = engine.get("reshard_after_forward")
        yield from of_reshard(value, reshard, role.subject, ranks)
    if "wrap_policy" in engine:
        yield from of_wrap_policy(engine["wrap_policy"], f"{key}.wrap_policy", role.subject)
