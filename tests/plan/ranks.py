"""Each rank's part in the tests of the plan; ``processes/rank_server.py`` starts the ranks."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

import precision_shim

from ..audit import builds
from ..audit.ranks import fsdp_model, fsdp_step, on_megatron, prepare
from ..processes.rank_server import Launch
from ..stand_ins.megatron_bridge import import_with_placeholders

# -- audits of built models ------------------------------------------------------------------------


def audits(launch: Launch) -> dict[str, Any]:
    """Audit each of eight builds after a step, and also plain bf16 with a bf16 bucket."""
    found = {}
    with on_megatron(launch, expert_model_parallel_size=launch.world):
        cases = {**builds.EIGHT, "copies": builds.Build(fp32_bucket=False)}
        for experts in (False, True):
            for name, build in cases.items():
                made = builds.make(builds.with_experts(build, experts))
                builds.step_without_forward(*made)
                audit = precision_shim.audit(*made)
                found[f"{'experts' if experts else 'dense'}: {name}"] = audit.to_dict()
    return found


def fsdp(launch: Launch) -> dict[str, Any]:
    """Audit FSDP2 with torch's AdamW and unequal shares."""
    launch.join()
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = fsdp_model(dtype, launch, frozen=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        fsdp_step(model, optimizer, dtype)
        found[str(dtype)] = precision_shim.audit(model, optimizer).to_dict()
    return found


# -- real models on the meta device ----------------------------------------------------------------


class Whole(torch.nn.Module):
    """TransformerEngine's linear layer in mode "duplicated": each rank has the whole matrix."""

    def __init__(self, inputs: int, outputs: int, **ignored: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs))


class Nothing(torch.nn.Module):
    """Replaces core attention, which has no parameters."""

    def __init__(self, **ignored: Any) -> None:
        super().__init__()


_PLAIN: dict[str, Any] = {
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "normalization": "RMSNorm",
    "use_cpu_initialization": True,
    "perform_initialization": False,
    "params_dtype": torch.bfloat16,
    "pipeline_dtype": torch.bfloat16,
    "bf16": True,
    "gradient_accumulation_fusion": False,
    "bias_dropout_fusion": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}


def _config(hf: dict[str, Any], fields: dict[str, Any]) -> Any:
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    values: dict[str, Any] = {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": hf["num_key_value_heads"],
        **_PLAIN,
        **fields,
    }
    if "head_dim" in hf:
        values["kv_channels"] = hf["head_dim"]
    experts = hf.get("num_experts") or hf.get("n_routed_experts")
    if experts:
        values |= {
            "num_moe_experts": experts,
            "moe_router_topk": hf["num_experts_per_tok"],
            "moe_ffn_hidden_size": hf["moe_intermediate_size"],
            "moe_grouped_gemm": False,
            "moe_token_dispatcher_type": "alltoall",
        }
    if "kv_lora_rank" not in hf:
        return TransformerConfig(**values)
    dense = hf["first_k_dense_replace"]
    return MLATransformerConfig(
        **values,
        multi_latent_attention=True,
        rope_type="rope",  # the other rope_type requests torch's device 0
        q_lora_rank=hf["q_lora_rank"],
        kv_lora_rank=hf["kv_lora_rank"],
        qk_head_dim=hf["qk_nope_head_dim"],
        qk_pos_emb_head_dim=hf["qk_rope_head_dim"],
        v_head_dim=hf["v_head_dim"],
        moe_layer_freq=[0] * dense + [1] * (hf["num_hidden_layers"] - dense),
        moe_shared_expert_intermediate_size=hf["moe_intermediate_size"] * hf["n_shared_experts"],
        moe_router_enable_expert_bias=True,
        moe_router_score_function="sigmoid",
        moe_router_pre_softmax=True,
    )


def _model(hf: dict[str, Any], config: Any, first: bool, last: bool) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )
    from megatron.core.transformer import multi_latent_attention as latent

    if "kv_lora_rank" in hf:
        latent.TELinear = Whole
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        for layer in spec.layer_specs:
            inner = layer.submodules.self_attention.submodules
            inner.core_attention = Nothing
            inner.linear_q_down_proj = inner.linear_kv_down_proj = Whole
    else:
        experts = hf.get("num_experts")
        spec = get_gpt_layer_local_spec(
            num_experts=experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm
        )
    with torch.device("meta"):
        return GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=hf["vocab_size"],
            max_sequence_length=8,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=hf["tie_word_embeddings"],
            position_embedding_type="rope",
        )


def _lora() -> Any:
    """Megatron-Bridge's LoRA, for models of Megatron's own layers."""
    import_with_placeholders("megatron.bridge", "megatron.bridge.peft.lora")
    from megatron.bridge.peft import lora, utils

    utils.HAVE_TE = False  # it found the placeholders
    return lora.LoRA


def parameters(launch: Launch) -> dict[str, list[list[int]]]:
    """Count trained dense and expert parameters on the first and the last rank of real models."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from precision_shim_tools.testing import megatron_on_cpu

    found: dict[str, list[list[int]]] = {}
    with megatron_on_cpu():
        for name, case in launch.options["cases"].items():
            world, groups = case["world"], case["groups"]
            found[name] = []
            for rank in (0, world - 1):
                os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0")
                dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
                parallel_state.initialize_model_parallel(**groups, create_gloo_process_groups=False)
                config = _config(case["hf"], {**groups, **case["fields"]})
                model = _model(case["hf"], config, rank == 0, rank == world - 1)
                sizes = [0, 0]
                if "lora" in case:
                    with torch.device("meta"):
                        _lora()(**case["lora"])(model)
                for one in model.parameters():
                    assert one.device.type == "meta"
                    allreduce = getattr(one, "allreduce", True)
                    sizes[not allreduce] += one.numel() * one.requires_grad
                found[name].append(sizes)
                parallel_state.destroy_model_parallel()
                dist.destroy_process_group()
    return found


__all__ = ["audits", "fsdp", "parameters", "prepare"]
