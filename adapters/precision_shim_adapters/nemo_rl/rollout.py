"""The dtypes in which a NeMo-RL job's policy, rollout and teacher compute.

Only the key of SGLang's dtype may be absent. The reference model is the policy itself with other
weights. Megatron's own rollout (``backend: megatron``) and the teachers of
``on_policy_distillation`` use the policy's config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from precision_shim.adapting import Call, seam, versioned
from precision_shim.errors import DtypeError
from precision_shim.precision.agreement import AUTO, ENGINE_NAMES, FP8, Engine
from precision_shim.precision.dtypes import name_of
from precision_shim.precision.names import ALIASES

from ..agreement.lm_head import report_heads, unchanged_heads
from ..agreement.model_files import resolve_by_model
from ..agreement.names import engine_name, with_rounded, write_key
from ..agreement.report import FEATURE, JobEngines, report_engines
from .training.dtensor import DTYPES, FRAMEWORK

GROUP = "rollout"
PLACE = "policy.generation"
_DELETE = "NeMo-RL compares the dtypes of its engines, and accepts aliases of dtype names"
_SECTIONS = {"vllm": ("vllm_cfg", "precision"), "sglang": ("sglang_cfg", "dtype")}
"""Maps a rollout engine to the section and the key of its dtype in the config."""


def coerce_names(generation: Any, place: str = PLACE) -> None:
    """Replace, in place, a generation config's dtype name by the one that vLLM and SGLang accept.

    Raises:
        DtypeError: the name at the key ``place`` is unknown, or vLLM would receive two dtypes.
    """
    name, field = _SECTIONS.get(str(generation.get("backend")), ("", ""))
    section = generation.get(name) or {}
    where = versioned(FRAMEWORK)
    if section.get(field) is not None:
        also = (AUTO, FP8) if name == "vllm_cfg" else (AUTO,)
        section[field] = engine_name(section[field], f"{place}.{name}.{field}", where, also)
    extra = (generation.get("vllm_kwargs") or {}).get("dtype") if name == "vllm_cfg" else None
    if extra is not None:
        key = f"{place}.vllm_kwargs.dtype"
        raise DtypeError(
            f"{where}: {key}={extra!r}: NeMo-RL passes vllm_cfg.precision to vLLM as the dtype, "
            "and fails in the rollout's worker where vllm_kwargs has another one; allowed: "
            f"{place}.vllm_cfg.precision alone. Write the dtype there, and leave {key} out.",
            key=key,
        )


@seam(
    "nemo_rl.models.generation:configure_generation_config",
    FEATURE,
    group=GROUP,
    why="every driver completes its generation config here; another spelling of a dtype ends vLLM "
    "and SGLang in an actor",
    delete_when=_DELETE,
    relies_on=("vllm_cfg", "backend"),
)
def configure(call: Call, config: Any, is_eval: Any = False) -> Any:
    """Replace the dtype name in a generation config before NeMo-RL completes the config.

    Raises:
        DtypeError: the name is unknown, or vLLM would receive two dtypes.
    """
    coerce_names(config, "generation" if is_eval else PLACE)
    return call.proceed()


def read_sides(config: Any) -> JobEngines | None:
    """Read a job's ``MasterConfig``; ``None`` without a rollout or for an unknown policy dtype.

    Raises:
        DtypeError: the rollout's dtype name is unknown.
    """
    policy = _part(config, "policy")
    trainer = _trained(policy, "policy")
    if trainer is None or not _generates(policy) or _part(config, "teachers"):
        return None
    rollout, teacher = _resolved(policy), _trained(_part(config, "teacher"), "teacher")
    others = [engine for engine in (rollout, teacher) if engine is not None]
    return JobEngines(trainer, others)


def _path(policy: Mapping[str, Any]) -> str:
    return str(policy.get("model_name") or "")


def _resolved(policy: Mapping[str, Any]) -> Engine | None:
    engine = _rollout_of(policy)
    if engine is None:
        return None
    return resolve_by_model(engine, str(policy["generation"].get("backend")), _path(policy))


def _trained(section: Mapping[str, Any], name: str) -> Engine | None:
    written = section.get("precision", "")
    dtype = DTYPES.get(written)
    return None if dtype is None else Engine(name, name_of(dtype), f"{name}.precision", written)


def _generates(policy: Mapping[str, Any]) -> bool:
    return isinstance(policy.get("generation"), Mapping)


read_heads = unchanged_heads("policy", "NeMo-RL")
"""Reads the LM head of the trainer."""


def _part(config: Any, name: str) -> Any:
    part = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return part or {}


def _rollout_of(policy: Mapping[str, Any]) -> Engine | None:
    trainer, generation = _trained(policy, "policy"), policy.get("generation")
    if trainer is None or not isinstance(generation, Mapping):
        return None
    backend = str(generation.get("backend"))
    if backend == "megatron":
        because = f"{PLACE}.backend is 'megatron', which computes in {trainer.key}"
        return replace(trainer, subject="rollout", because=because)
    name, field = _SECTIONS.get(backend, ("", ""))
    if not name:
        return None
    section, at = generation.get(name) or {}, f"{PLACE}.{name}"
    key, value, because = f"{PLACE}.{name}.{field}", section.get(field), ""
    if value is not None:
        read = engine_name(value, key, versioned(FRAMEWORK), (AUTO, FP8))
        if read == FP8:
            because = f"{key}=fp8, beside which NeMo-RL gives vLLM bfloat16"
    elif name == "vllm_cfg" or name not in generation:
        return None
    else:  # NeMo-RL passes SGLang no dtype
        read, because = AUTO, f"{key} is left out"
    own = Engine("rollout", ALIASES.get(read, read), key, value, because)
    options = {"kv_cache_dtype": section.get("kv_cache_dtype")}
    if name == "vllm_cfg" and read != FP8:  # with fp8 NeMo-RL itself writes these vllm_kwargs
        options, at = generation.get("vllm_kwargs") or {}, f"{PLACE}.vllm_kwargs"
    return with_rounded(own, options, at)


def asked_of(policy: Mapping[str, Any]) -> tuple[str, str] | None:
    """The value and key of the rollout's dtype in a policy's config; ``None`` without rollout."""
    engine = _rollout_of(policy)
    if engine is None:
        return None
    return ENGINE_NAMES.get(engine.computes, engine.computes), engine.key


@seam(
    feature=FEATURE,
    group=GROUP,
    at=[
        {"target": "nemo_rl.algorithms.grpo:setup"},
        {"target": "nemo_rl.algorithms.distillation:setup", "optional": True},
        {"target": "nemo_rl.algorithms.ppo:setup", "optional": True},
    ],
    why="the driver, before it asks Ray for a worker: policy, rollout and teacher have keys of "
    "their own",
    delete_when=_DELETE,
    relies_on=("policy", "generation"),
)
def compare_engines(call: Call, master_config: Any) -> Any:
    """Compare the dtypes of policy, rollout and teacher, and report whether they agree.

    Raises:
        DtypeError: the rollout's dtype name is unknown.
        UnsupportedPrecisionError: in strict mode, the policy is float16 and an engine is not.
    """
    both, write = read_sides(master_config), partial(write_key, master_config)
    if _generates(_part(master_config, "policy")):
        report_heads(versioned(FRAMEWORK), read_heads, None)
    if both is not None and both.trainer is not None:
        report_engines(versioned(FRAMEWORK), both.trainer, both.others, write)
    return call.proceed()
