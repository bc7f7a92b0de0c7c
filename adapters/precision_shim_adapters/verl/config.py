"""Read verl's config of a model: from the objects of a worker, or from a job's composed config.

verl's training engines take their dtypes from different keys. Each engine is a
``TrainingEngine``, and ``ModelConfig`` reads one model's config as its engine does.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import Any, NamedTuple

import torch

from precision_shim.adapting import definition, is_there, look, versioned
from precision_shim.adapting.dtypes import (
    COMPUTES,
    REDUCES,
    Written,
    coerce_dtype,
    name_of,
    names_precision,
    parse_dtype,
    values_of,
)
from precision_shim.adapting.rollouts import Engine, Format, formats
from precision_shim.errors import DtypeError

from .. import megatron
from ..megatron.policy.formats import read_format
from ..megatron.policy.legality import read_switch
from ..megatron.policy.optimizer_plan import PRECISION_AWARE_FIELDS
from ..megatron.policy.optimizer_plan import ROWS as MEGATRONS_FIELDS
from ..megatron.policy.requested import SETS
from ..torch_fp16.names import own_dtype, unscaled

ACTOR = "verl.workers.actor.dp_actor:DataParallelPPOActor"
CRITIC = "verl.workers.critic.dp_critic:DataParallelPPOCritic"
"""``ACTOR`` and ``CRITIC`` are the classes of verl 0.7.1's legacy FSDP workers."""

LEGACY = "legacy fsdp workers"
"""The group of the seams on verl's legacy FSDP workers."""

WORKERS = "use_legacy_worker_impl"
"""Key in the section ``trainer`` of verl 0.7; its value selects the engine or legacy workers."""

PPO = "actor_rollout_ref"
ROLLOUT = f"{PPO}.rollout"

CONFIG = "verl.utils.megatron.optimizer:init_megatron_optim_config"
FIELDS = "verl.workers.config.optimizer:McoreOptimizerConfig.__init__"
OVERRIDES = "override_optimizer_config"
ADAPTER_PATH = "lora_adapter_path"
"""Key of the folder from which verl loads trained LoRA adapters."""


def is_fp16(value: object) -> bool:
    """Whether a config's value names float16."""
    return value is not None and parse_dtype(str(value)) is torch.float16


_IMPL = "verl.workers.engine"


@dataclass(frozen=True)
class TrainingEngine:
    """What the shim knows of one of verl's training engines; formatted, it is the engine's class.

    Attributes:
        strategy: its name in verl's config.
        place: its class in ``verl.workers.engine``.
        computes: the key of its section for the dtype in which the layers compute.
        since: conditions; if all of them hold, the shim can scale its loss in float16.
        refused: the reason for refusing float16 if one of these conditions does not hold.
    """

    strategy: str = ""
    place: str = ""
    computes: str = ""
    since: tuple[str, ...] = ()
    refused: str = ""

    def __str__(self) -> str:
        return f"{_IMPL}.{self.place}"

    @property
    def group(self) -> str:
        """The group of the seams on the engine."""
        return megatron.GROUP if self is MEGATRON else f"{self.strategy} engine"

    @property
    def section(self) -> str:
        """The name of its section in a model's config."""
        return self.strategy if self.computes == "dtype" else "fsdp_config"

    @property
    def because(self) -> str:
        """Why the shim scales the loss of a model that computes in float16."""
        return f"{self.computes} is float16, and verl's {self.strategy} engine has no loss scaler"

    @property
    def refusal(self) -> str:
        """Why the engine of the installed verl cannot train in float16; empty if it can."""
        return "" if all(map(is_there, self.since)) else self.refused


_TURBO = "turbo_config.distributed.fsdp_plan"
_HAS_AUTOMODEL = (f"{_IMPL}.automodel",)  # 0.8.0
_TITAN = "torchtitan.transformer_impl:TorchTitanEngine"
_NEWEST_TITAN = (f"{_IMPL}.{_TITAN}.__init__ mentions ParamGroupConfig",)  # 0.9.0
MEGATRON = TrainingEngine("megatron", "megatron.transformer_impl:MegatronEngine", "dtype")
SHARDED = TrainingEngine("fsdp", "fsdp.transformer_impl:FSDPEngine", "mixed_precision.param_dtype")
TURBO = TrainingEngine(
    "fsdp_turbo",
    "fsdp.fsdp_turbo_impl:FSDPTurboEngineWithLMHead",
    f"{_TURBO}.param_dtype",
    (f"{_IMPL}.fsdp.fsdp_turbo_impl",),  # 0.9.1
)
_AUTOMODEL = "automodel.transformer_impl:AutomodelEngine"
AUTOMODEL = TrainingEngine("automodel", _AUTOMODEL, "mp_param_dtype", _HAS_AUTOMODEL)
VEOMNI = TrainingEngine(
    "veomni",
    "veomni.transformer_impl:VeOmniEngine",
    "dtype",
    _HAS_AUTOMODEL,
    "its VeOmni engine makes no loss scaler, and the VeOmni that it works with gathers parameters "
    "in bfloat16, by name in its code",
)
TITAN = TrainingEngine(
    "torchtitan",
    _TITAN,
    "dtype",
    _NEWEST_TITAN,
    "its torchtitan engine makes no loss scaler, and no torchtitan that it works with was "
    "released; the shim scales that of torchtitan 0.3.0",
)
_EVERY = (MEGATRON, SHARDED, TURBO, VEOMNI, AUTOMODEL, TITAN)
ENGINES = {"fsdp2": SHARDED, **{engine.strategy: engine for engine in _EVERY}}
"""Maps the config's ``strategy`` to its engine."""
_UNKNOWN = TrainingEngine()

MIXED = {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
"""The keys of ``mixed_precision`` that verl reads, and verl's defaults."""

_DEFAULTS = {
    "dtype": ("bfloat16", COMPUTES),
    "model_dtype": ("fp32", "params"),
    "mp_param_dtype": ("bf16", COMPUTES),
    "mp_reduce_dtype": ("fp32", REDUCES),
    "param_dtype": ("bf16", COMPUTES),
    "reduce_dtype": ("fp32", REDUCES),
    "output_dtype": ("bf16", ""),
}
"""Maps a dtype key to verl's default and to what the key sets."""
_UNREAD = {"wrap_policy": "", "turbo_config": "fsdp_turbo"}
"""Maps a section to the engine that reads dtypes there."""


def read_key(config: Any, key: str, default: Any = None) -> Any:
    """Read a key of a verl config: a dataclass, an OmegaConf node, a dict, or ``None``."""
    get = getattr(config, "get", None)
    return get(key, default) if get is not None else getattr(config, key, default)


def section_of(section: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The section under the last part of ``key``; empty if there is none."""
    value = section.get(key.rpartition(".")[2])
    return value if isinstance(value, Mapping) else {}


def is_legacy(asked: object = None) -> bool:
    """Whether a PPO job runs legacy workers; ``asked`` is its ``use_legacy_worker_impl``."""
    return asked != "disable" and look(f"{CRITIC}.update_critic").found


class Dtypes(NamedTuple):
    """The dtypes in which parameters are stored, layers compute and FSDP reduces the gradients.

    ``None`` stands for FSDP Turbo's default, which is not known here.
    """

    stored: torch.dtype
    computes: torch.dtype | None
    reduces: torch.dtype | None


@dataclass(frozen=True)
class ModelConfig:
    """verl's config of one model.

    Attributes:
        engine: the engine's section: a dataclass, an OmegaConf node or a dict.
        engine_key: its key in the job's config; each ``_key`` is the key of a section.
        subject: the model's name: ``"actor"``, ``"ref"`` or ``"critic"``.
        legacy: whether verl 0.7.1's legacy workers run the model.
        optim: the optimizer's section; empty for a model that is not trained.
        model: the section that describes the model.
        role: the section with the engine's and the optimizer's sections; empty for a fine-tuning.
        alone: whether nothing but the engine reads a dtype in ``model``.
        unbuilt: why the job does not build the model; empty if it does.
    """

    engine: Any
    strategy: str = "fsdp"
    engine_key: str = "fsdp_config"
    subject: str = "actor"
    legacy: bool = False
    optim: Mapping[str, Any] = field(default_factory=dict)
    optim_key: str = "optim"
    model: Mapping[str, Any] = field(default_factory=dict)
    model_key: str = "model"
    role: Mapping[str, Any] = field(default_factory=dict)
    role_key: str = ""
    alone: bool = True
    unbuilt: str = ""

    @property
    def kind(self) -> TrainingEngine:
        """The model's engine; empty for an engine that the shim does not know."""
        return ENGINES.get(self.strategy, _UNKNOWN)

    @property
    def trains(self) -> bool:
        """Whether the job trains the model."""
        return self.subject != "ref"

    @property
    def sharded(self) -> bool:
        """Whether verl's FSDP engine or its legacy FSDP workers run the model."""
        return self.kind is SHARDED

    @property
    def has_model_dtype(self) -> bool:
        """Whether the engine stores the parameters in the dtype ``model_dtype``."""
        return self.kind.computes not in ("", "dtype")

    @property
    def group(self) -> str:
        """The group of the seams on the model's engine or workers."""
        return LEGACY if self.legacy and self.sharded else self.kind.group

    @property
    def autocasts(self) -> bool:
        """Whether the autocast of legacy workers has the dtype ``dtype``, as not the critic's."""
        return self.legacy and self.subject != "critic"

    def get(self, key: str, default: Any = None) -> Any:
        """The value at a dotted key of the engine's section; ``default`` if it is null."""
        found = self.engine
        for name in key.split("."):
            found = read_key(found, name)
        return default if found is None else found

    def _read(self, key: str, default: str) -> torch.dtype:
        value = self.get(key, default)
        return own_dtype(value, f"{self.engine_key}.{key}", versioned("verl"))

    @property
    def stored(self) -> torch.dtype:
        """The dtype in which FSDP and FSDP Turbo store the parameters, from ``model_dtype``.

        Raises:
            DtypeError: verl does not accept the dtype name.
        """
        forward_only = self.get("forward_only", not self.trains)
        return self._read("model_dtype", "bf16" if forward_only else "fp32")

    @property
    def mixed(self) -> dict[str, torch.dtype]:
        """Maps the keys of ``mixed_precision`` to the dtypes that verl gives FSDP; may be empty.

        Raises:
            DtypeError: verl does not accept a dtype name; verl's error would not name the key.
        """
        mixed, place = self.get("mixed_precision"), f"{self.engine_key}.mixed_precision"
        if mixed is None:
            return {}
        if not hasattr(mixed, "get"):
            raise DtypeError(
                f"{versioned('verl')}: {place}={mixed!r} is no section; allowed: the keys "
                f"{', '.join(MIXED)}, such as mixed_precision: {{param_dtype: bf16}}. Correct "
                f"{place}.",
                key=place,
            )
        return {
            key: own_dtype(mixed.get(key, default), f"{place}.{key}", versioned("verl"))
            for key, default in MIXED.items()
        }

    @property
    def gathered(self) -> torch.dtype:
        """The dtype in which verl's FSDP gathers the parameters."""
        return self.mixed.get("param_dtype", torch.bfloat16)

    @property
    def lora(self) -> Mapping[str, Any]:
        """The arguments of the LoRA adapters that verl gives peft, or Megatron-Bridge; or empty."""
        own, model, path = read_key(self.model, "lora") or {}, self.model, ADAPTER_PATH
        if self.kind is MEGATRON and own.get("rank"):
            return dict(own)
        if not (self.sharded and (model.get("lora_rank") or (self.legacy and model.get(path)))):
            return {}
        if model.get(path):
            return {"path": model[path]}
        names = ("target_modules", "target_parameters", "exclude_modules")
        given = {name: model[name] for name in names if model.get(name) is not None}
        return {"task_type": "CAUSAL_LM", "r": model["lora_rank"], **given}

    @property
    def lora_dtype(self) -> torch.dtype:
        """The dtype of adapters on FSDP: peft makes them in fp32, and verl 0.9 casts its own."""
        casts = "mismatched" in look(f"{SHARDED}._build_lora_module").names
        return self.stored if casts and "path" not in self.lora else torch.float32

    @property
    def declared(self) -> torch.dtype | None:
        """The dtype of a model on Megatron; ``None`` if its name is unknown."""
        return parse_dtype(str(self.get("dtype") or "bfloat16"))

    @property
    def refusal(self) -> str:
        """Why the engine does not train in the float16 that the config has; empty if it does."""
        return self.kind.refusal if self.kind.refused and is_fp16(self.get("dtype")) else ""

    def dtypes(self) -> Dtypes:
        """The dtypes of an engine that is not Megatron's.

        Raises:
            DtypeError: verl does not accept a dtype name.
        """
        if self.kind in (VEOMNI, TITAN):
            masters = self.kind is TITAN or self.get("mixed_precision")
            low = is_fp16(self.get("dtype")) and not self.refusal
            stored = torch.float32 if masters else torch.bfloat16  # in which they also reduce
            return Dtypes(stored, torch.float16 if low else torch.bfloat16, stored)
        if self.kind is AUTOMODEL:
            names = {"model_dtype": "fp32", "mp_param_dtype": "bf16", "mp_reduce_dtype": "fp32"}
            return Dtypes(*map(self._read, names, names.values()))
        if self.kind is TURBO:
            found = (self.get(f"{_TURBO}.{name}") for name in ("param_dtype", "reduce_dtype"))
            return Dtypes(self.stored, *(parse_dtype(str(value)) for value in found))
        stored, computes = self.stored, self.gathered
        if self.legacy and self.subject == "actor":  # trains in fp16 if one of both is fp16
            own = self._read("dtype", "bfloat16")
            if own is torch.float16 or self.get("mixed_precision") is None:
                computes = own
        return Dtypes(stored, computes, self.mixed.get("reduce_dtype", torch.float32))

    @property
    def in_fp32(self) -> str:
        """The key of the engine's section, with its value, that keeps the parameters in fp32."""
        written = "mixed_precision=true" if self.kind is VEOMNI else "model_dtype=fp32"
        return f"{self.engine_key}.{written}"

    def check_fp16(self) -> None:
        """Refuse settings with which VeOmni or Automodel cannot train in float16.

        Raises:
            DtypeError: VeOmni without ``mixed_precision``; Automodel without a policy of dtypes,
                with parameters in float16, or with an output in bfloat16.
        """

        def check(key: str, allows: Callable[[Any], bool], why: str, allowed: str) -> None:
            value, place, beside = self.get(key), f"{self.engine_key}.{key}", self.kind.computes
            if not allows(value):
                raise DtypeError(
                    f"{versioned('verl')}: {place}={value!r} beside {self.engine_key}.{beside}="
                    f"{self.get(beside)!r}: {why}; allowed: {allowed}. Set {place}="
                    f"{allowed.partition(',')[0]}.",
                    key=place,
                )

        if self.kind is VEOMNI:
            why = "VeOmni then loads and trains bfloat16 weights"
            check("mixed_precision", bool, why, "True, with fp32 weights")
        elif self.kind is AUTOMODEL:
            why = "it takes no mp_param_dtype"
            check("distributed_strategy", lambda value: bool(value == "fsdp2"), why, "fsdp2")
            why = "parameters and optimizer states are then in float16, where AdamW's eps is 0"
            check("model_dtype", lambda value: not is_fp16(value), why, "fp32, bf16")
            why = "torch refuses to combine bfloat16 outputs with float16 in one autocast"
            names = ("bf16", "fp16", "float16", "16", "fp32", "float32", "32")  # bf16: the default
            check("mp_output_dtype", lambda value: str(value) in names, why, "fp16, fp32")

    def compared(self) -> Engine | None:
        """The engine as it is compared with the rollout; ``None`` if the shim does not know it.

        Raises:
            DtypeError: verl does not accept a dtype name.
        """
        if self.strategy not in ENGINES or self.kind is AUTOMODEL:
            return None
        key, because = self.kind.computes, self.refusal
        if self.kind is MEGATRON:
            dtype = self.declared or torch.bfloat16
        elif self.sharded and self.legacy:
            key, dtype = "dtype", self._read("dtype", "bfloat16")
            if dtype is torch.float32:  # such an autocast has no effect: the parameters' dtype has
                dtype = self.mixed.get("param_dtype", dtype)
            place = f"{self.engine_key}.{key}"
            because = f"{place}: the dtype of verl's autocast, in which the matrix products run"
        elif self.sharded:
            dtype, place = self.gathered, f"{self.engine_key}.{key}"
            # From 0.8 verl's FSDP engine autocasts to FSDP's dtype, and not always to bfloat16.
            follows = "_autocast_dtype" in look(f"{SHARDED}._build_fsdp_module").names
            if dtype is not torch.float32 and not follows:
                because = f"verl {SHARDED.group}: it autocasts to bfloat16, whatever {place} says"
                return Engine(self.subject, "bf16", "", because=because)
        else:  # FSDP Turbo autocasts to bfloat16, unless the shim replaces this
            low = is_fp16(self.get(key)) and not self.refusal
            dtype = torch.float16 if low else torch.bfloat16
        value = self.get(key)
        place, prefix = f"{self.engine_key}.{key}", "++" if value is None else ""
        place = "" if self.refusal else place
        return Engine(self.subject, name_of(dtype), place, value, because, prefix)

    @property
    def reads_own_qat(self) -> bool:
        """Whether the model's section ``qat`` counts, and not the one of its engine."""
        return self.legacy and self.sharded

    @property
    def format(self) -> Format | None:
        """What the model's quantized layers compute in; ``None`` if they are not quantized."""
        found = qat_format(self.get("qat"), f"{self.engine_key}.qat")
        if self.reads_own_qat:
            found = qat_format(self.role.get("qat"), f"{self.role_key}.qat")
        if found is not None or self.kind is not MEGATRON:
            return found
        name = "override_transformer_config"
        return read_format(self.get(name, {}), f"{self.engine_key}.{name}.{{}}")

    def written(self, prefix: str = "") -> Iterator[Written]:
        """Yield the dtype keys of the engine's section, if the engine is not Megatron's.

        A value of ``_DEFAULTS`` may be verl's default, and does not count as written. ``prefix`` is
        put before the keys that would take effect.
        """
        for key, value in values_of(self.engine):
            (top, *_), name = key.split("."), key.rpartition(".")[2]
            default, sets = _DEFAULTS.get(name, (None, ""))
            if top == "mixed_precision":
                # FSDP2 has no dtype of buffers, and leaves them in fp32.
                in_fp32 = self.strategy == "fsdp" or parse_dtype(str(value)) is torch.float32
                counts = key != top and not (name == "buffer_dtype" and in_fp32)
            else:
                own = key in _DEFAULTS and not (self.autocasts and key == "dtype")
                reader = _UNREAD.get(top, self.strategy)
                unread = names_precision(name, value) and reader != self.strategy
                counts = (own or unread) and value not in (None, default)
            if counts:
                right = self._place_of(name, sets)
                one = Written(f"{self.engine_key}.{key}", value, sets)
                needs = f"{prefix}{self.engine_key}.{right}={one.dtype or value}"
                yield one if right in ("", key) else Written(one.key, value, sets, needs)

    def _place_of(self, name: str, sets: str) -> str:
        """The key from which the engine reads what a dtype key's name says; empty if none."""
        if name.startswith(("model_", "mp_")):
            return name
        if sets == COMPUTES:
            return self.kind.computes if self.has_model_dtype else ""
        near = get_close_matches(name, MIXED, n=1, cutoff=0.65)
        return f"mixed_precision.{near[0]}" if near and self.sharded else ""

    def unscaled(self, computes: torch.dtype | None) -> str:
        """A warning about float16 in parameters or reductions if the loss is not scaled, or empty.

        ``computes`` is the dtype in which the layers compute.
        """
        asked = [
            one.key.removeprefix(f"{self.engine_key}.")
            for one in self.written()
            if one.dtype == "fp16" and one.sets in ("params", REDUCES) and not one.needs
        ]
        return unscaled(versioned("verl"), asked, computes, self.kind.computes or "dtype")


def qat_format(section: Any, key: str) -> Format | None:
    """The format of a section ``qat`` at ``key``, with which verl trains as the rollout rounds."""
    if not read_key(section, "enable"):
        return None
    mode, size = read_key(section, "mode", "w4a16"), read_key(section, "group_size", 16)
    one = formats.Quantized("e2m1", f"nvfp4, 1x{size}")
    parts = formats.parts_of(one, one if mode == "w4a4" else None)
    return Format(parts, tuple(read_key(section, "ignore_patterns") or ()), f"{key}.mode={mode}")


def of_section(config: Any, place: str = "", **known: Any) -> ModelConfig:
    """Read an engine's config; ``place`` is its key; ``known`` are further fields of the result."""
    strategy = read_key(config, "strategy") or "fsdp"
    place = place or ENGINES.get(strategy, _UNKNOWN).section
    return ModelConfig(config, strategy, place, **known)


def of_worker(owner: Any) -> ModelConfig:
    """Read the config of an engine that is not Megatron's, or of a legacy actor or critic."""
    subject, config = subject_of(owner), getattr(owner, "engine_config", None)
    if config is not None:
        return of_section(config, subject=subject)
    own = owner.config
    section = read_key(own, "fsdp_config") or read_key(read_key(own, "model"), "fsdp_config")
    return of_section(section, subject=subject, legacy=True)


def subject_of(owner: Any) -> str:
    """``"actor"`` or ``"critic"``: the model of an engine, or of a legacy actor or critic."""
    kind = getattr(getattr(owner, "model_config", None), "model_type", "")
    return "critic" if kind == "value_model" or hasattr(owner, "critic_optimizer") else "actor"


Sections = Callable[[Mapping[str, Any], str], Mapping[str, Any]]
"""Reads a section like ``section_of``; the plan's raises an error for a section without keys."""


def of_ppo(config: Mapping[str, Any], sections: Sections = section_of) -> tuple[ModelConfig, ...]:
    """Read actor, reference model and critic of a PPO job, from its config as plain data."""
    shared, algorithm = sections(config, PPO), sections(config, "algorithm")
    actor, ref = sections(shared, f"{PPO}.actor"), sections(shared, f"{PPO}.ref")
    model, critic = sections(shared, f"{PPO}.model"), sections(config, "critic")
    legacy = is_legacy(sections(config, "trainer").get(WORKERS))
    # A rollout with quantized weights reads the dtype in transformers' config.
    quantized = sections(shared, f"{PPO}.rollout").get("quantization")
    penalty = algorithm.get("use_kl_in_reward") or actor.get("use_kl_loss")
    no_ref = "" if penalty else "algorithm.use_kl_in_reward and actor.use_kl_loss are off"
    bridged = sections(model, f"{PPO}.model.lora").get("rank")
    if bridged or model.get("lora_rank") or model.get(ADAPTER_PATH):
        no_ref = "the actor without its LoRA adapters is the reference model"
    enabled, estimator = critic.get("enable"), algorithm.get("adv_estimator")
    no_critic = "" if enabled else "critic.enable=false"
    if enabled is None:
        no_critic = "" if estimator == "gae" else f"algorithm.adv_estimator={estimator}"
    merged = {**ref, "strategy": ref.get("strategy") or actor.get("strategy")}
    own, read = sections(critic, "critic.model"), partial(of_role, sections=sections, legacy=legacy)
    shares: dict[str, Any] = {"model": model, "model_key": f"{PPO}.model"}
    return (
        read(actor, f"{PPO}.actor", alone=not quantized, **shares),
        read(merged, f"{PPO}.ref", alone=False, unbuilt=no_ref, **shares),
        read(critic, "critic", model=own, model_key="critic.model", unbuilt=no_critic),
    )


def of_role(
    role: Mapping[str, Any], key: str, sections: Sections = section_of, **known: Any
) -> ModelConfig:
    """Read the sections of a PPO job's model, whose FSDP section two releases of verl moved.

    ``key`` is the config key of the section ``role``; ``known`` are further fields of the result.
    """
    strategy, subject = str(role.get("strategy") or "fsdp"), key.rpartition(".")[2]
    own = ENGINES.get(strategy, _UNKNOWN).section
    names = ("fsdp_config", "fsdp") if own == "fsdp_config" else (own,)
    places = {f"{key}.{name}": sections(role, f"{key}.{name}") for name in names}
    place = f"{key}.model.fsdp_config"
    places[place] = sections(sections(role, f"{key}.model"), place)
    # verl's section has hydra's key; one that the user wrote in another place does not.
    order = sorted(places, key=lambda name: "_target_" not in places[name])
    place = next((name for name in order if places[name]), f"{key}.{names[0]}")
    optim = sections(role, f"{key}.optim") if subject != "ref" else {}
    known.update(optim=optim, optim_key=f"{key}.optim", role=role, role_key=key)
    return ModelConfig(places[place], strategy, place, subject, **known)


def of_tuning(config: Mapping[str, Any], sections: Sections = section_of) -> ModelConfig:
    """Read the sections of a fine-tuning job, from its config as plain data."""
    engine, optim, model = (sections(config, key) for key in ("engine", "optim", "model"))
    mcore = "Mcore" in str(engine.get("_target_", ""))
    strategy = str(engine.get("strategy") or ("megatron" if mcore else "fsdp"))
    return ModelConfig(engine, strategy, "engine", optim=optim, model=model)


def has_fields() -> bool:
    """Whether verl's ``init_megatron_optim_config`` reads fields for the states' dtypes (0.9)."""
    return "bf16" in look(CONFIG).parameters


def own_spellings() -> tuple[str, ...]:
    """The dtype names that verl's fields for the states' dtypes take; empty before 0.9."""
    check = definition(FIELDS.replace("__init__", "__post_init__"))
    sets = (node for node in ast.walk(check.node) if isinstance(node, ast.Set)) if check else ()
    named = (tuple(sorted(ast.literal_eval(node))) for node in sets)
    return next((names for names in named if "fp32" in names), ())


def read_field(key: str, value: Any) -> Any:
    """Convert the value of one of verl 0.9's fields for the states' dtypes.

    Raises:
        DtypeError: the value is no dtype name.
    """
    read = read_switch if key == megatron.PRECISION_AWARE else coerce_dtype
    return read(value, key=f"optim.{key}", where=versioned("verl"))


def _opt_in(optim_config: Any, fields: bool) -> dict[str, Any]:
    """Read verl 0.9's fields for the states' dtypes, and convert dtype names to dtypes.

    Before 0.9, the user wrote every such field. From 0.9, ``use_precision_aware_optimizer`` has the
    default ``False``, which does not count as the user's choice.
    """
    if fields and not read_key(optim_config, megatron.PRECISION_AWARE):
        return {}
    found = {key: read_key(optim_config, key) for key in PRECISION_AWARE_FIELDS}
    return {key: read_field(key, value) for key, value in found.items() if value is not None}


def _written(optim_config: Any, place: str) -> Iterator[Written]:
    """Yield verl's fields for the states' dtypes that differ from verl's default, fp32."""
    aware = bool(read_key(optim_config, megatron.PRECISION_AWARE))
    offloads = (read_key(optim_config, OVERRIDES) or {}).get("optimizer_cpu_offload")
    for key in PRECISION_AWARE_FIELDS[1:]:
        value = read_key(optim_config, key)
        if value is not None and parse_dtype(str(value)) is not torch.float32:
            # verl reads the fields for bf16 models only
            needs = f"{OVERRIDES}.{key}={value}" if aware else f"{megatron.PRECISION_AWARE}=true"
            if offloads and aware:
                needs = f"{OVERRIDES}.optimizer_cpu_offload=False"
            yield Written(f"{place}.{key}", value, SETS[key], f"{place}.{needs}")


def read_requested(
    optim_config: Any,
    ddp_config: Mapping[str, Any] | None = None,
    *,
    place: str = "optim",
    **known: Any,
) -> megatron.RequestedConfig:
    """Read a model's settings from verl's configs; ``known`` are further fields of the result.

    ``place`` is the config's key of ``optim_config``.
    """
    written, fields = ddp_config or {}, has_fields()
    overrides = read_key(optim_config, OVERRIDES) or {}
    return megatron.RequestedConfig(
        where=f"{versioned('verl')}, {OVERRIDES}",
        asked={str(key): overrides[key] for key in overrides},
        auto="as-configured" if fields else "guarded",
        # verl itself sets these fields for an fp16 model
        native={torch.float16: MEGATRONS_FIELDS[torch.float16]},
        opt_in=_opt_in(optim_config, fields),
        reads_opt_in=fields,
        optimizer=str(read_key(optim_config, "optimizer", "adam")),
        bucket_in_fp32=(
            bool(written["grad_reduce_in_fp32"]) if "grad_reduce_in_fp32" in written else None
        ),
        nan_check_written="check_for_nan_in_grad" in written,
        wrote=tuple(_written(optim_config, place)),
        **known,
    )


def of_configs(config: Any, optim_config: Any, **known: Any) -> megatron.RequestedConfig:
    """Read a model's settings from its engine's config; ``known`` are further fields."""
    blockers = []
    if read_key(config, "use_megatron_fsdp", False):
        blockers.append("Megatron-FSDP keeps gradients and states in its own buffers")
    if read_key(optim_config, "use_layer_wise_distributed_optimizer", False):
        blockers.append("the layer-wise distributed optimizer (Muon) builds no FusedAdam")
    return read_requested(
        optim_config,
        # In 0.9 and later the engine itself adds grad_reduce_in_fp32 to the DDP's config, so read
        # the user's config.
        read_key(config, "override_ddp_config"),
        blockers=tuple(blockers),
        # mbridge's DDP turns the distributed optimizer on, regardless of verl's config (0.7.1).
        distributed=bool(read_key(config, "use_distributed_optimizer", True)),
        **known,
    )


def of_engine(engine: Any) -> megatron.RequestedConfig:
    """Read a model's settings from a Megatron engine that has already read its configs."""
    return of_configs(
        engine.engine_config,
        engine.optimizer_config,
        subject="critic" if getattr(engine, "is_value_model", False) else "actor",
        declared=getattr(engine, "param_dtype", None),
    )
