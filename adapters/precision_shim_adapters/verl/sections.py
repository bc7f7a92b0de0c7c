"""Read a model's sections of verl's config, and check them for keys that their dataclasses lack.

In a worker, hydra would raise a TypeError for a key that the dataclass lacks. The shim reads the
dataclasses' fields from verl's source.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from precision_shim.adapting import look, versioned
from precision_shim.planning.record import Problem, unknown_keys
from precision_shim.planning.values import mapping, number_of
from precision_shim.precision.dtypes import parse_dtype
from precision_shim_adapters.megatron.deciding.table import PRECISION_AWARE_FIELDS

from ..fp16.plan import of_torch
from ..fp16.states import fault_of_eps
from ..resolving import MISSING
from . import fsdp
from .megatron import has_fields

_PACKAGE = "verl.workers.config"
_MODULES = ("engine", "optimizer", "actor", "critic")
_BASE = "verl.trainer.config.config:BaseModelConfig"
"""A base of dataclasses in ``_PACKAGE``; ``look`` reads only bases in the dataclass's own file."""

_HYDRAS = ("_target_", "_convert_", "_recursive_", "_partial_")
_OWN_SECTION = ("megatron", "veomni", "torchtitan")


@dataclass(frozen=True)
class Place:
    """Where a model is in the config, and on how many GPUs.

    Attributes:
        subject: the model's name, such as ``"actor"``.
        key: the config key of the model's section; empty in a fine-tuning job.
        world: number of GPUs.
        world_key: the config key of the number of GPUs.
        group: the group of the seams on the model's workers, if the engine is FSDP.
    """

    subject: str
    key: str
    world: int
    world_key: str
    group: str = fsdp.ENGINE


@dataclass(frozen=True)
class Section:
    """The sections of one model.

    Attributes:
        at: the model's place in the config.
        engine_key: the config key of the engine's section.
        strategy: the engine's strategy.
        engine: the engine's section.
        optim: the optimizer's section; empty for a model that is not trained.
        model: the section that describes the model.
        sequence: the size of Ulysses' sequence parallelism from the model's own section; newer
            configs set this size in the engine's section instead.
        illegal: the problems with keys that verl does not know.
    """

    at: Place
    engine_key: str
    strategy: str
    engine: Mapping[str, Any]
    optim: Mapping[str, Any]
    model: Mapping[str, Any]
    sequence: int = 1
    illegal: tuple[Problem, ...] = ()

    @property
    def trains(self) -> bool:
        """Whether the job trains the model."""
        return self.at.subject != "ref"

    @property
    def optim_key(self) -> str:
        """The config key of the optimizer's section."""
        return f"{self.at.key}.optim" if self.at.key else "optim"


def of_role(
    at: Place,
    role: Mapping[str, Any],
    model: Mapping[str, Any],
    unresolved: Collection[str],
    *,
    dispatches: bool,
) -> Section:
    """Read the section of a PPO job's model.

    Two releases of verl moved the critic's FSDP section.

    Args:
        at: the model's place in the config.
        role: the model's section.
        model: the section that describes the model.
        unresolved: see ``with_keys``.
        dispatches: see ``unknown``.

    Raises:
        PlanError: a section has no keys.
    """
    strategy = str(role.get("strategy") or "fsdp")
    names = (strategy,) if strategy in _OWN_SECTION else ("fsdp_config", "fsdp")
    places = {name: role.get(name, {}) for name in names}
    inner = role.get("model")
    if isinstance(inner, Mapping):
        places["model.fsdp_config"] = inner.get("fsdp_config", {})
    name = next((name for name, found in places.items() if found), names[0])
    key, trains = f"{at.key}.{name}", at.subject != "ref"
    engine = _engine(places[name], key, unresolved)
    optim = _optim(role.get("optim", {}), f"{at.key}.optim", unresolved) if trains else {}
    sequence = number_of(role, f"{at.key}.ulysses_sequence_parallel_size", versioned("verl"))
    # verl renames keys of a reference model's section before it makes a dataclass of the section.
    place, checked = (at.key, role) if trains else (key, engine)
    illegal = tuple(unknown(checked, place, at.subject, dispatches=dispatches))
    return Section(at, key, strategy, engine, optim, model, sequence, illegal)


def of_tuning(
    at: Place, config: Mapping[str, Any], unresolved: Collection[str], *, dispatches: bool
) -> Section:
    """Read the sections of a fine-tuning job; for the arguments and errors see ``of_role``."""
    engine = _engine(config["engine"], "engine", unresolved)
    model = with_keys(config.get("model"), "model", unresolved)
    optim = _optim(config["optim"], "optim", unresolved)
    target = str(engine.get("_target_", ""))
    strategy = str(engine.get("strategy") or ("megatron" if "Mcore" in target else "fsdp"))
    illegal = [
        *unknown(engine, "engine", at.subject, dispatches=dispatches),
        *unknown(optim, "optim", at.subject, dispatches=dispatches),
    ]
    return Section(at, "engine", strategy, engine, optim, model, illegal=tuple(illegal))


def with_keys(section: object, key: str, unresolved: Collection[str]) -> Mapping[str, Any]:
    """Return a section; one that cannot be resolved on this machine counts as empty.

    Args:
        section: the value in the config.
        key: the section's key.
        unresolved: the keys that cannot be resolved, and whose value is ``None``.

    Raises:
        PlanError: the section has no keys.
    """
    return {} if key in unresolved else mapping(section, key, versioned("verl"))


def _engine(section: object, key: str, unresolved: Collection[str]) -> Mapping[str, Any]:
    engine, inner = with_keys(section, key, unresolved), "override_transformer_config"
    with_keys(engine.get(inner, {}), f"{key}.{inner}", unresolved)
    return engine


def _optim(section: object, key: str, unresolved: Collection[str]) -> Mapping[str, Any]:
    optim, inner = with_keys(section, key, unresolved), "override_optimizer_config"
    with_keys(optim.get(inner) or {}, f"{key}.{inner}", unresolved)
    return optim


def unknown(
    section: Mapping[str, Any], key: str, subject: str, *, dispatches: bool
) -> Iterator[Problem]:
    """List the keys of a section and its nested sections that verl's dataclasses lack.

    Args:
        section: a section with hydra's ``_target_``; without ``_target_``, any key is allowed.
        key: the config's key of the section; may be empty.
        subject: the model's name, such as ``"actor"``.
        dispatches: whether the shim adds verl 0.9's dtype fields to ``McoreOptimizerConfig``.
    """
    name = str(section.get("_target_", "")).rpartition(".")[2]
    known = set(_fields(name))
    if name == "McoreOptimizerConfig" and dispatches:
        known.update(PRECISION_AWARE_FIELDS)
    yield from unknown_keys(
        [known_key for known_key in section if known_key not in _HYDRAS],
        known,
        subject,
        f"{key}.{{}}" if key else "{}",
        f"{versioned('verl')}'s {name}",
    )
    for word, inner in section.items():
        if isinstance(inner, Mapping) and "_target_" in inner:
            inner_key = f"{key}.{word}" if key else str(word)
            yield from unknown(inner, inner_key, subject, dispatches=dispatches)


def missing(keys: Iterable[str], read: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem for each key with OmegaConf's ``???`` that verl certainly reads.

    Args:
        keys: the keys with ``???``.
        read: keys that verl reads, and sections of which verl reads every key.
    """
    for key in keys:
        if any(f"{key}.".startswith(f"{place}.") for place in read):
            yield Problem(
                "missing",
                "",
                key,
                f"{versioned('verl')} reads it, and its value is {MISSING}, which ends the job",
                "Write a value.",
            )


def _fields(name: str) -> tuple[str, ...]:
    if not name:
        return ()
    looks = (look(f"{_PACKAGE}.{module}:{name}.__init__") for module in _MODULES)
    symbol = next((symbol for symbol in looks if symbol.found), None)
    if symbol is None:
        return ()
    inherited = look(f"{_BASE}.__init__").parameters if _BASE.split(":")[1] in symbol.names else ()
    return (*symbol.parameters, *inherited)


def of_torch_optimizer(optim: Mapping[str, Any], key: str, subject: str) -> Iterator[Problem]:
    """Yield a problem if torch refuses the optimizer's name or one of its arguments."""
    place = str(optim.get("optimizer_impl") or "torch.optim")
    name = str(optim.get("optimizer") or "AdamW")
    if place != "torch.optim":
        return
    written = optim.get("override_optimizer_config") or {}
    keys = f"{key}.optimizer", f"{key}.override_optimizer_config.{{}}"
    yield from of_torch(name, written, keys, subject)


def of_fp16_moments(
    optim: Mapping[str, Any], stored: str, optimizer: str, subject: str
) -> Iterator[Problem]:
    """Yield a problem if torch's optimizer cannot step parameters that are stored in fp16.

    Args:
        optim: the optimizer's section.
        stored: the config key of the parameters' dtype.
        optimizer: class name of the optimizer.
        subject: the model's name, such as ``"actor"``.
    """
    written = optim.get("override_optimizer_config") or {}
    eps = written.get("eps", 1e-8)
    if (optim.get("optimizer_impl") or "torch.optim") != "torch.optim" or written.get("fused"):
        return
    fault = fault_of_eps(optimizer, eps) if isinstance(eps, float) else ""
    if fault:
        fault = f"{versioned('verl')}: {stored}=fp16: {fault}"
        yield Problem("dtype", subject, stored, fault, f"Set {stored}=fp32.")


def of_megatron(
    engine: Mapping[str, Any], optim: Mapping[str, Any], keys: tuple[str, str], subject: str
) -> Iterator[Problem]:
    """Yield a problem for each dtype in a Megatron config that verl's own checks refuse.

    Args:
        engine: the engine's section.
        optim: the optimizer's section; empty for a model that is not trained.
        keys: the config keys of the engine's section and of the optimizer's section.
        subject: the model's name, such as ``"actor"``.
    """
    allowed = ("bfloat16", "float16")
    dtype = engine.get("dtype", "bfloat16")
    if dtype not in allowed:
        yield Problem(
            "dtype",
            subject,
            f"{keys[0]}.dtype",
            f"{versioned('verl')}: {keys[0]}.dtype={dtype!r}: its Megatron engine takes "
            f"{' or '.join(allowed)}",
            f"Correct {keys[0]}.dtype.",
        )
    for field in PRECISION_AWARE_FIELDS[1:] if has_fields() else ():
        value = optim.get(field)
        # YAML reads verl's dtype name "32" as a number.
        known = parse_dtype(str(value)) if isinstance(value, int | str) else None
        if field in optim and known not in (torch.float32, torch.bfloat16):
            yield Problem(
                "dtype",
                subject,
                f"{keys[1]}.{field}",
                f"{versioned('verl')}: {keys[1]}.{field}={value!r}: its optimizer's config takes "
                "fp32 or bf16",
                f"Write one of them, or {keys[1]}.override_optimizer_config.{field}.",
            )
