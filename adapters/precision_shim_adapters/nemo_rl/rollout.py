"""The dtypes in which a NeMo-RL job's policy, rollout and teacher compute.

Only the key of SGLang's dtype may be absent. The reference model is the policy itself with other
weights. Megatron's rollout (``backend: megatron``) and the teachers of
``on_policy_distillation`` use the policy's config.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from precision_shim.adapting import Call, Decision, seam, versioned
from precision_shim.adapting.rollouts import AUTO, FP8, Engine, Gate, Head
from precision_shim.errors import DtypeError

from ..agreement.lm_head import of_automodel, of_rollout, unchanged_heads
from ..agreement.model_files import gates_of, resolve_by_model
from ..agreement.names import engine_name, write_key
from ..agreement.report import FEATURE, Sides, report_sides
from .config import FRAMEWORK, PLACE, SECTIONS, is_read, read_rollout, read_trained

GROUP = "rollout"
_SINGLE = "nemo_rl.algorithms.single_controller_utils.setup:setup_single_controller"
_DELETE = "NeMo-RL compares the dtypes of its engines, and accepts aliases of dtype names"


def coerce_names(generation: Any, place: str = PLACE) -> None:
    """Replace, in place, a generation config's dtype name by the one that vLLM and SGLang accept.

    Raises:
        DtypeError: the name at the key ``place`` is unknown, or vLLM would receive two dtypes.
    """
    name, field = SECTIONS.get(str(generation.get("backend")), ("", ""))
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


def read_sides(config: Any) -> Sides | None:
    """Read both sides of a job's ``MasterConfig``; ``None`` without a rollout.

    Raises:
        DtypeError: the rollout's dtype name is unknown.
    """
    policy = _part(config, "policy")
    generation = policy.get("generation")
    if not isinstance(generation, Mapping):
        return None
    trainer = None if _part(config, "teachers") else read_trained(policy, "policy")
    others: list[Engine] = []
    gates: tuple[Gate, ...] = ()
    if trainer is not None:
        rollout, teacher = read_rollout(policy), read_trained(_part(config, "teacher"), "teacher")
        if rollout is not None:
            path = str(policy.get("model_name") or "")
            backend, megatron = str(generation.get("backend")), policy.get("megatron_cfg") or {}
            rollout = resolve_by_model(rollout, backend, path)
            on_megatron = trainer if megatron.get("enabled") else None
            place = "policy.megatron_cfg.{}"
            gates = gates_of(on_megatron, [rollout], backend, path, megatron, place=place)
        others = [engine for engine in (rollout, teacher) if engine is not None]
    heads = unchanged_heads("policy", "NeMo-RL", [_served(policy)], _own_head(policy))
    decided = tuple(_unseen(generation.get("refit_transport")))
    if trainer is not None and trainer.because:
        decided += (Decision(FRAMEWORK, "policy", FEATURE, trainer.computes, trainer.because),)
    return Sides(FRAMEWORK, versioned(FRAMEWORK), trainer, others, heads, decided, gates)


def _own_head(policy: Mapping[str, Any]) -> Head | None:
    """Describe the policy's LM head if the user made NeMo-RL compute it in fp32."""
    megatron, sharded = policy.get("megatron_cfg") or {}, policy.get("dtensor_cfg") or {}
    if megatron.get("enabled"):
        written = megatron.get("fp32_lm_head")  # tf32 does not round 16-bit factors either
        key = f"policy.megatron_cfg.fp32_lm_head={written}"
        idle = written and not is_read("megatron", "fp32_lm_head")
        refusal = f"{versioned(FRAMEWORK)} does not read {key}" if idle else ""
        return Head("policy", key, bool(written), refusal)
    if not (sharded.get("_v2") and is_read("dtensor", "moe_parallelizer")):
        return None
    options, place = sharded.get("moe_parallelizer") or {}, "policy.dtensor_cfg.moe_parallelizer"
    return of_automodel("policy", options, place, sharded.get("expert_parallel_size"))


def _served(policy: Mapping[str, Any]) -> Head:
    generation, key = policy["generation"], "policy.hf_config_overrides.head_dtype"
    backend, section = str(generation.get("backend")), generation.get("vllm_cfg") or {}
    if backend not in ("vllm", "dynamo"):
        return of_rollout(f"NeMo-RL's {backend}", {}, PLACE)
    if section.get("fp32_lm_head") and is_read("vllm", "fp32_lm_head"):
        return Head("rollout", f"{PLACE}.vllm_cfg.fp32_lm_head", in_fp32=True)
    # NeMo-RL replaces the hf_overrides in vllm_kwargs by the policy's, and with fp8 by its own.
    head = of_rollout("vllm", {"hf_overrides": policy.get("hf_config_overrides")}, PLACE)
    if head.in_fp32 and section.get("precision") != FP8:
        return replace(head, key=key)
    return Head("rollout", key, refusal=f"{key} changes the policy's config, too")


def _unseen(transport: object) -> Iterator[Decision]:
    """Say that the audit of the sent weights does not cover a transport of NeMo-RL's main."""
    if transport is not None:
        because = "this transport does not send them through the functions that the audit wraps"
        if transport == "nccl_reshard":
            because = "only the weights that are broadcast reach a function that the audit wraps"
        chosen = f"{PLACE}.refit_transport={transport}: the sent weights are not audited whole"
        yield Decision(FRAMEWORK, "weight sync", "audit", chosen, because)


def _part(config: Any, name: str) -> Any:
    part = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return part or {}


@seam(
    feature=FEATURE,
    group=GROUP,
    at=[
        {"target": "nemo_rl.algorithms.grpo:setup"},
        {"target": "nemo_rl.algorithms.distillation:setup", "optional": True},
        {"target": "nemo_rl.algorithms.ppo:setup", "optional": True},
        {"target": _SINGLE, "optional": True},
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
    sides = read_sides(master_config)
    if sides is not None:
        report_sides(sides, partial(write_key, master_config))
    return call.proceed()
