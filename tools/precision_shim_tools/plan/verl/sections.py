"""Read the sections of a model's engine and optimizer in verl's config, and check their keys.

In a worker, hydra would raise a TypeError for a key that the section's dataclass lacks. The shim
reads the dataclasses' fields from verl's source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from precision_shim.adapting import look, versioned
from precision_shim.errors import DtypeError, PlanError
from precision_shim.precision.dtypes import parse_dtype
from precision_shim.precision.effect import Written, values_of
from precision_shim.precision.findings import Problem
from precision_shim_adapters.megatron.policy.optimizer_plan import PRECISION_AWARE_FIELDS
from precision_shim_adapters.torch_fp16.names import own_dtype
from precision_shim_adapters.torch_fp16.states import fault_of_eps
from precision_shim_adapters.verl.training import automodel, engines, fsdp, torchtitan, veomni
from precision_shim_adapters.verl.training.megatron import has_fields, own_spellings

from ..record import unknown_keys
from ..values import not_built, number_of, section_of

_MODULES = ("engine", "optimizer", "actor", "critic")
_HYDRAS = ("_target_", "_convert_", "_recursive_", "_partial_")
_AUTOMODEL = {"model_dtype": "fp32", "mp_param_dtype": "bf16", "mp_reduce_dtype": "fp32"}
_OWN_SECTION = ("megatron", "veomni", "torchtitan")


@dataclass(frozen=True)
class Section:
    """The sections of one model.

    Attributes:
        subject: the model's name, such as ``"actor"``.
        engine_key: the config key of the engine's section.
        optim_key: the config key of the optimizer's section.
        optim: the optimizer's section; empty for a model that is not trained.
        model: the section that describes the model.
        sequence: the size of Ulysses' sequence parallelism, if the model's own section sets it.
        group: the group of the seams on the model's workers, if the engine is FSDP.
        role: the section with the engine's and the optimizer's sections; empty for a fine-tuning.
        role_key: the config key of ``role``.
        model_key: the config key of ``model``.
        alone: whether nothing but the engine reads a dtype in ``model``.
    """

    subject: str
    engine_key: str
    optim_key: str
    strategy: str
    engine: Mapping[str, Any]
    optim: Mapping[str, Any]
    model: Mapping[str, Any]
    sequence: int = 1
    group: str = fsdp.ENGINE
    role: Mapping[str, Any] = field(default_factory=dict)
    role_key: str = ""
    model_key: str = ""
    alone: bool = False

    @property
    def trains(self) -> bool:
        """Whether the job trains the model."""
        return self.subject != "ref"


def inner(section: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """See ``section_of``."""
    return section_of(section, key, versioned("verl"))


def of_role(
    subject: str, key: str, role: Mapping[str, Any], model: Mapping[str, Any], group: str
) -> Section:
    """Read the sections of a PPO job's model, whose FSDP section two releases of verl moved.

    ``key`` is the config key of the section ``role``; ``model`` describes the model.

    Raises:
        PlanError: a section has no keys.
    """
    strategy = str(role.get("strategy") or "fsdp")
    names = (strategy,) if strategy in _OWN_SECTION else ("fsdp_config", "fsdp")
    places = {f"{key}.{name}": inner(role, f"{key}.{name}") for name in names}
    place = f"{key}.model.fsdp_config"
    places[place] = inner(inner(role, f"{key}.model"), place)
    # verl's own section has hydra's key; one that the user wrote in another place does not.
    order = sorted(places, key=lambda name: "_target_" not in places[name])
    engine_key = next((name for name in order if places[name]), f"{key}.{names[0]}")
    optim = inner(role, f"{key}.optim") if subject != "ref" else {}
    sequence = number_of(role, f"{key}.ulysses_sequence_parallel_size", versioned("verl"))
    engine, optim_key = places[engine_key], f"{key}.optim"
    return Section(
        subject, engine_key, optim_key, strategy, engine, optim, model, sequence, group, role, key
    )


def of_tuning(config: Mapping[str, Any]) -> Section:
    """Read the sections of a fine-tuning job; for the errors see ``of_role``."""
    engine, optim, model = (inner(config, key) for key in ("engine", "optim", "model"))
    target = str(engine.get("_target_", ""))
    strategy = str(engine.get("strategy") or ("megatron" if "Mcore" in target else "fsdp"))
    return Section(
        "actor", "engine", "optim", strategy, engine, optim, model, model_key="model", alone=True
    )


def overridden(section: Section) -> Iterator[Written]:
    """Yield the dtypes in transformers' config, which FSDP's engines replace by ``model_dtype``."""
    place = f"{section.model_key}.override_config"
    config = inner(section.model, place)
    if "model_config" in config:
        place = f"{place}.model_config"
        config = inner(config, place)
    known = section.alone and section.strategy in fsdp.COMPUTE_KEYS
    for name in ("dtype", "torch_dtype") if known else ():
        if config.get(name):
            yield Written(f"{place}.{name}", config[name], "params")


def tell_not_built(section: Section, because: str) -> list[str]:
    """Return a note on the dtypes that the user wrote for a model; see ``not_built``."""
    wrote = list(map(str, fsdp.written(section.engine, section.strategy, section.engine_key)))
    for key, value in values_of(section.optim):
        if key.endswith("_dtype") and value not in (None, "fp32"):
            wrote.append(f"{section.optim_key}.{key}={value}")
    return not_built(section.subject, because, wrote)


@dataclass(frozen=True)
class Sharded:
    """An engine's dtypes and sizes.

    Attributes:
        compute: dtype in which the parameters are gathered.
        because: why the shim scales an fp16 model's loss.
        group: the group of the seams that scale the model's loss.
        reduce: dtype in which FSDP reduces the gradients; ``None`` if unknown.
        sizes: maps a field of ``ShardedModel`` to the key that sets it in the engine's section.
        note: why the engine does not compute in float16 although the config has float16.
    """

    stored: torch.dtype
    compute: torch.dtype
    because: str
    group: str
    reduce: torch.dtype | None = torch.float32
    sizes: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


def read_sharded(section: Section) -> Sharded:
    """Read the dtypes and sizes of a model on another engine than Megatron.

    Raises:
        DtypeError: verl does not accept a dtype, or cannot train in the dtype.
        PlanError: the plan cannot compute the engine's parallelism, or cannot find its dtype.
    """
    engine, key, strategy = section.engine, section.engine_key, section.strategy
    for degree in ("expert_parallel_size", "ep_size", "pipeline_parallel_size", "pp_size"):
        if (engine.get(degree) or 1) != 1:
            raise PlanError(
                f"{versioned('verl')}, {key}.{degree}={engine[degree]}: planned are data, tensor "
                f"and context parallelism of its {strategy} engine. Set {key}.{degree}=1."
            )
    if strategy in engines.FLAGGED:
        return _of_flag(engine, key, strategy)
    if strategy == "automodel":
        stored, compute, reduce = (
            own_dtype(engine.get(name) or default, f"{key}.{name}", versioned("verl"))
            for name, default in _AUTOMODEL.items()
        )
        if compute is torch.float16:
            automodel.check_fp16(engine, key)
        sizes = {"tensor": "tp_size", "context": "cp_size", "replicas": "dp_replicate_size"}
        group = engines.GROUPS[engines.AUTOMODEL]
        return Sharded(stored, compute, automodel.BECAUSE, group, reduce, sizes)
    stored = fsdp.model_dtype({"forward_only": not section.trains, **engine}, key)
    sizes = {"shards": "fsdp_size", "context": "ulysses_sequence_parallel_size"}
    if strategy == "fsdp_turbo":
        asked = engines.turbo_plan(engine)
        dtype = parse_dtype(str(asked.get("param_dtype")))
        if dtype is None:
            place = f"{key}.{fsdp.COMPUTE_KEYS[strategy]}"
            raise PlanError(
                f"{versioned('verl')}: {place}={asked.get('param_dtype')!r} is no dtype, and FSDP "
                f"Turbo's default is not known here. Set {place}."
            )
        group = engines.GROUPS[engines.TURBO]
        sums = parse_dtype(str(asked.get("reduce_dtype")))
        return Sharded(stored, dtype, engines.TURBO_BECAUSE, group, sums, sizes)
    mixed = fsdp.mixed_dtypes(engine, key)
    compute = mixed.get("param_dtype", torch.bfloat16)
    if section.group == fsdp.LEGACY and section.subject == "actor":
        compute = fsdp.of_legacy_actor(engine, compute, key)
    reduce = mixed.get("reduce_dtype", torch.float32)
    return Sharded(stored, compute, fsdp.scaled_because(), section.group, reduce, sizes)


def _of_flag(engine: Mapping[str, Any], key: str, strategy: str) -> Sharded:
    """Read an engine whose ``dtype`` is float16 or not: VeOmni or torchtitan."""
    low, why = engines.of_flag(strategy, engine)
    note = f"dtype=float16 is not what it trains in, but bfloat16: {why}" if why else ""
    group, stored = engines.GROUPS[engines.FLAGGED[strategy]], torch.float32
    if strategy == "torchtitan":
        sizes = {"shards": "data_parallel_shard_size"}
        sizes.update(tensor="tensor_parallel_size", context="context_parallel_size")
        return Sharded(stored, low, torchtitan.BECAUSE, group, sizes=sizes, note=note)
    if low is torch.float16:
        veomni.check_fp16(engine, key)
    if not engine.get("mixed_precision"):
        stored = torch.bfloat16
    sizes = {"shards": "fsdp_size", "context": "ulysses_parallel_size"}
    return Sharded(stored, low, veomni.BECAUSE, group, stored, sizes, note)  # reduces as it stores


def unknown(section: Section, *, dispatches: bool) -> Iterator[Problem]:
    """Yield a problem for each key of a model's sections that verl's dataclass lacks.

    Without hydra's ``_target_``, any key is allowed. ``dispatches``: the shim adds verl 0.9's dtype
    fields to ``McoreOptimizerConfig``.
    """
    engine_key, known, names = section.engine_key, {}, {}
    sections = {section.role_key: section.role, section.optim_key: section.optim}
    sections[engine_key] = section.engine
    for key, read in sections.items():
        name = names[key] = str(read.get("_target_", "")).rpartition(".")[2]
        looks = [look(f"verl.workers.config.{module}:{name}.__init__") for module in _MODULES]
        known[key] = set(next((symbol.parameters for symbol in looks if symbol.found), ()))
        if name == "McoreOptimizerConfig" and dispatches:
            known[key].update(PRECISION_AWARE_FIELDS)
    places = {word: f"{key}.{word}" for key, words in known.items() for word in words}
    moved = {"fsdp_config": engine_key}
    if section.strategy == "megatron":
        moved = {"fsdp_config": f"{engine_key}.dtype"}
    else:
        need = "--config-name=ppo_megatron_trainer beside it, as only Megatron's optimizer has it"
        moved.update(dict.fromkeys(PRECISION_AWARE_FIELDS, need))
    if section.strategy in ("fsdp", "fsdp2"):
        moved.update({word: f"{engine_key}.mixed_precision.{word}" for word in fsdp.MIXED})
        if section.group == fsdp.ENGINE:  # the engine does not read its ``dtype``
            moved["dtype"] = moved["param_dtype"]
    for key, read in sections.items():
        own = {word: f"{key}.{word}" for word in known[key]}
        # The worker of a reference model renames its keys that begin with log_prob_.
        written = [word for word in read if word not in _HYDRAS and word[:9] != "log_prob_"]
        whose, place = f"{versioned('verl')}'s {names[key]}", f"{key}.{{}}"
        yield from unknown_keys(
            written, known[key], section.subject, place, whose, places=places | own | moved
        )


def check_moments(section: Section, optimizer: str) -> None:
    """Raise ``DtypeError`` if torch's optimizer cannot step parameters that are stored in fp16."""
    written = inner(section.optim, f"{section.optim_key}.override_optimizer_config")
    eps, stored = written.get("eps", 1e-8), f"{section.engine_key}.model_dtype"
    own = (section.optim.get("optimizer_impl") or "torch.optim") != "torch.optim"
    if own or written.get("fused") or not isinstance(eps, float):
        return
    fault = fault_of_eps(optimizer, eps)
    if fault:
        where = versioned("verl")
        raise DtypeError(f"{where}: {stored}=fp16: {fault}. Set {stored}=fp32.", key=stored)


def check_megatron(section: Section) -> None:
    """Raise ``DtypeError`` for a dtype that verl's own configs of a model on Megatron refuse."""
    dtype = section.engine.get("dtype", "bfloat16")
    if dtype not in ("bfloat16", "float16"):
        raise _refused(f"{section.engine_key}.dtype", dtype, "bfloat16 or float16")
    for name in PRECISION_AWARE_FIELDS[1:] if has_fields() else ():
        value = section.optim.get(name, "fp32")
        # YAML reads verl's dtype name "32" as a number.
        known = parse_dtype(str(value)) if isinstance(value, int | str) else None
        if known not in (torch.float32, torch.bfloat16):
            raise _refused(f"{section.optim_key}.{name}", value, "fp32 or bf16")


def not_spelled(section: Section) -> Iterator[Problem]:
    """Yield the dtypes that verl's own fields take only where dtype-coercion is in force."""
    names = own_spellings()
    for name in PRECISION_AWARE_FIELDS[1:] if names else ():
        value, key = section.optim.get(name, "fp32"), f"{section.optim_key}.{name}"
        if str(value) not in names:
            fault = f"{versioned('verl')}: {name}={value!r}: verl itself takes {', '.join(names)}"
            remedy = "Write one of these, or let the shim's dtype-coercion act in the job."
            yield Problem("dtype", section.subject, key, fault, remedy)


def _refused(key: str, value: object, allowed: str) -> DtypeError:
    return DtypeError(
        f"{versioned('verl')}: {key}={value!r}: its worker takes {allowed}. Correct {key}.", key=key
    )
