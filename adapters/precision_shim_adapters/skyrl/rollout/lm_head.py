"""SkyRL: compute the LM head in fp32 in policy, reference model and inference engines.

The driver writes a key into ``model_config_kwargs``, which override the HF config. On Megatron,
SkyRL reads only the key ``model_config`` inside ``model_config_kwargs``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from precision_shim.adapting import Call, seam, versioned
from precision_shim.adapting.rollouts import SETTING, Head

from ...agreement import lm_head as shared
from ...agreement.report import FEATURE
from ...megatron.training.lm_head import compute_in_fp32 as compute_megatrons
from ..config import INFERENCE, LAYERS, has_reference, overriding, started_elsewhere

GROUP = "LM head"
_WORKERS = "skyrl.backends.skyrl_train.workers"
_DELETE = "SkyRL computes the LM head in fp32 by an option"


def read_heads(config: Any, in_force: shared.IsInForce) -> list[Head]:
    """Describe the LM heads of a job's policy, reference model and inference engines."""
    trainer, engines = config.trainer, config.generator.inference_engine
    group, heads = f"Megatron {GROUP}" if trainer.strategy == "megatron" else GROUP, []
    for role in ("policy", "ref") if has_reference(trainer) else ("policy",):
        place, overrides = _overrides(trainer, role)
        refusal = ""
        if trainer.strategy not in ("fsdp", "fsdp2", "megatron"):
            refusal = f"the shim does not change the LM head of SkyRL's {trainer.strategy} workers"
        elif getattr(trainer, "fused_lm_head_logprob", False):
            refusal = (
                "trainer.fused_lm_head_logprob multiplies in the model's dtype, set it to false"
            )
        elif role == "policy" and shared.names_head(_targets(trainer.policy.model)):
            refusal = "trainer.policy.model.lora.target_modules has the LM head"
        elif not in_force(FEATURE, group):
            refusal = shared.NOT_IN_FORCE
        ours = shared.of_trainer(role, overrides, place, refusal)
        fields = f"trainer.{role}.megatron_config.{LAYERS}"
        own = getattr(getattr(trainer, role).megatron_config, LAYERS) or {}
        on_megatron = own if trainer.strategy == "megatron" else {}
        heads.append(shared.by_megatron(role, on_megatron, f"{fields}.logit_dtype") or ours)
    if started_elsewhere(engines):
        refusal = "servers that SkyRL does not start keep the head that they were started with"
        return [*heads, Head("rollout", refusal=refusal)]
    if getattr(engines, "enable_fp32_lm_head", False):  # SkyRL's main
        return [*heads, Head("rollout", f"{INFERENCE}.enable_fp32_lm_head", in_fp32=True)]
    backend = str(engines.backend)
    sections = overriding(engines) or {f"{INFERENCE}.engine_init_kwargs": {}}
    heads += [shared.of_rollout(backend, values, section) for section, values in sections.items()]
    return heads


def _overrides(trainer: Any, role: str) -> tuple[str, Mapping[str, Any]]:
    model, place = getattr(trainer, role), f"trainer.{role}"
    if trainer.strategy == "megatron":
        whole = model.megatron_config.model_config_kwargs or {}
        return f"{place}.megatron_config.model_config_kwargs.model_config", (
            whole.get("model_config") or {}
        )
    return f"{place}.model_config_kwargs", model.model_config_kwargs or {}


def _targets(model: Any) -> Any:
    lora = getattr(model, "lora", None)
    return getattr(lora, "target_modules", None) if getattr(lora, "rank", 0) else None


def _without_mark(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the key for an fp32 LM head, which SkyRL would otherwise save in the HF config."""
    return {name: value for name, value in overrides.items() if name != shared.FIELD}


@seam(
    f"{_WORKERS}.model_wrapper:HFModelWrapper.__init__",
    FEATURE,
    group=GROUP,
    why="builds the Hugging Face model of policy and reference model before FSDP wraps it",
    delete_when=_DELETE,
    relies_on=("model",),
    optional=True,
)
def build_model(call: Call, model_config_kwargs: Any) -> None:
    """Make an FSDP worker's language model compute its LM head in fp32.

    Raises:
        UnsupportedPrecisionError: the LM head is no plain linear layer.
    """
    marked = shared.is_marked(model_config_kwargs)
    if marked:
        call.arguments["model_config_kwargs"] = _without_mark(model_config_kwargs)
    call.proceed()
    if marked:
        shared.compute_in_fp32(call.instance.model, versioned("skyrl"))


@seam(
    f"{_WORKERS}.megatron.megatron_worker:MegatronWorker.init_configs",
    FEATURE,
    group=f"Megatron {GROUP}",
    why="makes the provider that later builds the model chunks of policy and reference model",
    delete_when=_DELETE,
    relies_on=("provider", "register_pre_wrap_hook"),
    optional=True,
)
def make_provider(call: Call, model_config_kwargs: Any) -> Any:
    """Make a Megatron worker's model compute its LM head in fp32.

    Raises:
        UnsupportedPrecisionError: the output layer of Megatron cannot compute in fp32.
    """
    inner: Any = (model_config_kwargs or {}).get("model_config")
    marked = shared.is_marked(inner)
    if marked:
        rest = {**model_config_kwargs, "model_config": _without_mark(inner)}
        call.arguments["model_config_kwargs"] = rest
    result = call.proceed()
    if marked:

        def change(chunks: Any) -> Any:
            compute_megatrons(chunks, versioned("skyrl"), SETTING)
            return chunks

        call.instance.provider.register_pre_wrap_hook(change)
    return result
