"""verl: compute the LM head in fp32 in actor, reference model and rollout.

The key for actor and reference model is ``override_config`` of their model, which verl copies into
the model's HF config. The key for the rollout is in ``engine_kwargs``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from precision_shim.adapting import Call, seam, versioned

from ..megatron.acting.head import compute_in_fp32 as compute_megatrons
from ..rollout import (
    FEATURE,
    NOT_IN_FORCE,
    SETTING,
    Head,
    InForce,
    compute_in_fp32,
    is_marked,
    of_rollout,
    of_trainer,
)
from . import fsdp

GROUP = "LM head"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
_DELETE = "verl computes the LM head in fp32 by an option"

MODEL_KEYS = ("override_config", "use_fused_kernels", "target_modules")
"""The keys of ``actor_rollout_ref.model`` that this file reads."""


def read_heads(config: Mapping[str, Any], in_force: InForce) -> list[Head]:
    """Describe the LM heads of a PPO job's actor, reference model and rollout.

    Args:
        config: the job's config as plain data.
        in_force: see ``InForce``.
    """
    shared = config["actor_rollout_ref"]
    model, rollout = shared.get("model") or {}, shared["rollout"]
    legacy = fsdp.group_of((config.get("trainer") or {}).get(fsdp.WORKERS)) == fsdp.LEGACY
    heads = []
    for subject in ("actor", "ref"):  # a reference model is the actor's model with other weights
        role = shared.get(subject) or {}
        strategy = str(role.get("strategy") or shared["actor"].get("strategy") or "fsdp")
        place, overrides = _overrides(model, nested=legacy and strategy == "megatron")
        group = f"Megatron {GROUP}" if strategy == "megatron" else GROUP
        if legacy and strategy != "megatron":
            group = f"legacy {GROUP}"
        refusal = _refuses(model, role, strategy, subject)
        if not refusal and not in_force(FEATURE, group):
            refusal = NOT_IN_FORCE
        heads.append(of_trainer(subject, overrides, place, refusal))
    backend, section = str(rollout.get("name") or ""), rollout.get("engine_kwargs") or {}
    quantised = "quantization" if rollout.get("quantization") else ""
    options = section.get(backend) or {}
    heads.append(
        of_rollout(
            backend,
            options,
            f"{ROLLOUT}.engine_kwargs.{backend}",
            f"{ROLLOUT}.{quantised}" if quantised else "",
        )
    )
    return heads


def _overrides(model: Mapping[str, Any], *, nested: bool) -> tuple[str, object]:
    """The overrides of the HF config and their key; 0.7.1's Megatron workers read a part."""
    place, overrides = f"{MODEL}.override_config", model.get("override_config") or {}
    if nested or "model_config" in overrides:
        return f"{place}.model_config", overrides.get("model_config")
    return place, overrides


def _refuses(model: Mapping[str, Any], role: Mapping[str, Any], strategy: str, subject: str) -> str:
    if strategy not in ("fsdp", "fsdp2", "megatron"):
        return f"the shim does not change the LM head of verl's {strategy} engine"
    if model.get("use_fused_kernels"):
        return f"{MODEL}.use_fused_kernels multiplies in the model's dtype, set it to False"
    if strategy == "megatron" and (role.get("megatron") or {}).get("use_megatron_fsdp"):
        key = f"actor_rollout_ref.{subject}.megatron.use_megatron_fsdp"
        return f"{key}: Megatron-FSDP owns the LM head's weight"
    targets = model.get("target_modules")
    if targets and "lm_head" in ([targets] if isinstance(targets, str) else targets):
        return f"{MODEL}.target_modules has lm_head, whose adapter would compute beside fp32"
    return ""


@seam(
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngine._build_module",
    FEATURE,
    group=GROUP,
    why="returns the Hugging Face model before LoRA and FSDP wrap it",
    delete_when=_DELETE,
    relies_on=("model_config", "hf_config"),
    optional=True,
)
def build_model(call: Call) -> Any:
    """Make the FSDP engine's language model compute its LM head in fp32.

    Raises:
        UnsupportedPrecisionError: the LM head is no plain linear layer.
    """
    module = call.proceed()
    critic = type(call.instance).__name__.endswith("ValueHead")
    if not critic and is_marked(call.instance.model_config.hf_config):
        compute_in_fp32(module, versioned("verl"))
    return module


@seam(
    "verl.workers.fsdp_workers:ActorRolloutRefWorker._build_model_optimizer",
    FEATURE,
    group=f"legacy {GROUP}",
    why="returns the Hugging Face model of actor or reference model, wrapped by FSDP",
    delete_when="verl 0.8 is the oldest in use",
    optional=True,
)
def build_legacy_model(call: Call, override_model_config: Any) -> Any:
    """Make a legacy FSDP worker's model compute its LM head in fp32.

    Raises:
        UnsupportedPrecisionError: the LM head is no plain linear layer.
    """
    built = call.proceed()
    if is_marked(override_model_config):
        compute_in_fp32(built[0], versioned("verl"))
    return built


@seam(
    "verl.utils.megatron_utils:make_megatron_module",
    FEATURE,
    group=f"Megatron {GROUP}",
    why="returns the model chunks of actor, reference model and critic",
    delete_when=_DELETE,
    relies_on=("is_value_model",),
    optional=True,
)
def build_chunks(call: Call, wrap_config: Any, hf_config: Any) -> Any:
    """Make a language model on Megatron compute its LM head in fp32.

    Raises:
        UnsupportedPrecisionError: Megatron's output layer cannot compute in fp32.
    """
    built = call.proceed()
    if not wrap_config.is_value_model and is_marked(hf_config):
        compute_megatrons(built[0], versioned("verl"), SETTING)
    return built
