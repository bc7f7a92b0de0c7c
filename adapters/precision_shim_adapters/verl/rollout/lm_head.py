"""verl: compute the LM head in fp32 in actor, reference model and rollout.

The key of actor and reference model is in ``override_config``, which verl copies into the model's
HF config; the rollout's key is in ``engine_kwargs``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from precision_shim.adapting import Call, seam, versioned
from precision_shim.adapting.dtypes import parse_dtype
from precision_shim.adapting.rollouts import SETTING, Head

from ...agreement import lm_head as fp32_head
from ...agreement.report import FEATURE
from ...megatron.training.lm_head import compute_in_fp32 as compute_megatrons
from ..config import MEGATRON, PPO, ROLLOUT, SHARDED, ModelConfig, of_ppo

GROUP = "LM head"
MODEL = f"{PPO}.model"


def read_heads(config: Mapping[str, Any], in_force: fp32_head.IsInForce) -> list[Head]:
    """Describe the LM heads of a PPO job (config as plain data): actor, reference, rollout."""
    rollout, heads = config[PPO]["rollout"], []
    for one in of_ppo(config)[:2]:  # a reference model is the actor's model with other weights
        model, on_megatron = one.model, one.strategy == "megatron"
        place, overrides = _overrides(model, nested=one.legacy and on_megatron)
        group = f"Megatron {GROUP}" if on_megatron else GROUP
        group = f"legacy {group}" if one.legacy else group
        refusal = _refuses(one)
        if not refusal and not in_force(FEATURE, group):
            refusal = fp32_head.NOT_IN_FORCE
        ours = fp32_head.of_trainer(one.subject, overrides, place, refusal)
        heads.append(_by_engine(one) or ours)
    backend, section = str(rollout.get("name") or ""), rollout.get("engine_kwargs") or {}
    qat = (rollout.get("qat") or {}).get("enable")
    quantised = "qat" if qat else "quantization" if rollout.get("quantization") else ""
    options, place = section.get(backend) or {}, f"{ROLLOUT}.engine_kwargs.{backend}"
    quantised = f"{ROLLOUT}.{quantised}" if quantised else ""
    head = fp32_head.of_rollout(backend, options, place, quantised)
    if backend == "sglang" and _adapts_in_sglang(model):
        # With a LoRA adapter on the LM head, SGLang ignores enable_fp32_lm_head.
        refusal = "SGLang puts a LoRA adapter on its LM head, which then computes in 16 bits"
        remedy = f"Name the modules in {MODEL}.target_modules, or write {MODEL}.lora.merge=True"
        head = Head("rollout", head.key, refusal=refusal, remedy=remedy)
    return [*heads, head]


def _by_engine(one: ModelConfig) -> Head | None:
    """Describe the LM head if the user makes the engine itself compute it in fp32."""
    if one.strategy == "megatron":
        name = "override_transformer_config"
        key = f"{one.engine_key}.{name}.logit_dtype"
        return fp32_head.by_megatron(one.subject, one.get(name, {}), key)
    options, experts = dict(one.get("moe_config", {})), one.get("ep_size")
    if parse_dtype(str(one.get("mp_output_dtype"))) is torch.float32:
        options["wrap_outer_model"] = False  # which rounds no logits then
    return fp32_head.of_automodel(one.subject, options, f"{one.engine_key}.moe_config", experts)


def _adapts_in_sglang(model: Mapping[str, Any]) -> bool:
    """Whether SGLang's LM head has a LoRA adapter, as with the target ``all-linear``."""
    lora = model.get("lora") or {}
    if not (model.get("lora_rank") or lora.get("rank")) or lora.get("merge"):
        return False
    return (model.get("target_modules") or "all-linear") == "all-linear"


def _overrides(model: Mapping[str, Any], *, nested: bool) -> tuple[str, object]:
    """Return the config section whose values override the HF config: its key, and its values."""
    place, overrides = f"{MODEL}.override_config", model.get("override_config") or {}
    if nested or "model_config" in overrides:  # 0.7.1's Megatron workers read only model_config
        return f"{place}.model_config", overrides.get("model_config")
    return place, overrides


def _refuses(one: ModelConfig) -> str:
    model, on_megatron = one.model, one.strategy == "megatron"
    if not one.sharded and not on_megatron:
        return f"the shim does not change the LM head of verl's {one.strategy} engine"
    for section, place in ((model, MODEL), (one.role, one.role_key)):
        if section.get("use_fused_kernels"):
            return f"{place}.use_fused_kernels multiplies in the model's dtype, set it to False"
    if on_megatron and one.get("use_megatron_fsdp"):
        key = f"{one.engine_key}.use_megatron_fsdp"
        return f"{key}: Megatron-FSDP owns the LM head's weight"
    targets = (model.get("target_modules"), (model.get("lora") or {}).get("target_modules"))
    if fp32_head.names_head(*targets):
        return f"target_modules of {MODEL} has the LM head, whose adapter computes in 16 bits"
    return ""


def _compute_in_fp32(model: Any, overrides: Any, hf_config: Any) -> None:
    """If the driver set the fp32 head's key, change a Hugging Face model or Megatron's chunks.

    Raises:
        UnsupportedPrecisionError: the LM head cannot compute in fp32.
    """
    inner = overrides.get("model_config", overrides) if hasattr(overrides, "get") else None
    if not fp32_head.is_marked(inner):
        return
    vars(hf_config).pop(fp32_head.FIELD, None)  # verl would save the key with the model
    if hasattr(model, "get_output_embeddings"):
        vars(model.config).pop(fp32_head.FIELD, None)
        fp32_head.compute_in_fp32(model, versioned("verl"))
    else:
        compute_megatrons(model, versioned("verl"), SETTING)


@seam(
    feature=FEATURE,
    at=[
        {
            "target": f"{SHARDED}._build_module",
            "group": GROUP,
            "why": "returns the Hugging Face model before LoRA and FSDP wrap it",
        },
        {
            "target": f"{MEGATRON}._build_megatron_module",
            "group": f"Megatron {GROUP}",
            "why": "returns the model chunks before the optimizer is built",
        },
    ],
    delete_when="verl computes the LM head in fp32 by an option",
    relies_on=("model_config", "hf_config"),
    optional=True,
)
def build_model(call: Call) -> Any:
    """Make an engine's language model compute its LM head in fp32."""
    model, config = call.proceed(), call.instance.model_config
    if not type(call.instance).__name__.endswith("ValueHead"):  # a critic has no LM head
        _compute_in_fp32(model, config.override_config, config.hf_config)
    return model


@seam(
    feature=FEATURE,
    at=[
        {
            "target": "verl.workers.fsdp_workers:ActorRolloutRefWorker._build_model_optimizer",
            "group": f"legacy {GROUP}",
            "why": "returns the Hugging Face model of actor or reference model, wrapped by FSDP",
        },
        {
            "target": "verl.workers.megatron_workers:ActorRolloutRefWorker._build_model_optimizer",
            "group": f"legacy Megatron {GROUP}",
            "why": "returns the model chunks of actor or reference model",
            "relies_on": ("hf_config",),
        },
    ],
    delete_when="verl 0.8 is the oldest in use",
    optional=True,
)
def build_legacy_model(call: Call, override_model_config: Any) -> Any:
    """Make a legacy worker's model compute its LM head in fp32."""
    built = call.proceed()
    hf_config = getattr(call.instance, "hf_config", built[-1])  # FSDP's worker returns it
    _compute_in_fp32(built[0], override_model_config, hf_config)
    return built
