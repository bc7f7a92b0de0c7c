"""Models for the tests of the plan, made from the values of their config.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from precision_shim_tools.plan.command import Job
from precision_shim_tools.plan.request import Rules
from precision_shim_tools.plan.shapes import Model, Weight

if TYPE_CHECKING:
    from precision_shim.process.settings import Settings

QWEN25_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "topk_group": 4,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "tie_word_embeddings": False,
}


def mixture(config: dict[str, Any]) -> Model:
    """The weights that transformers builds from the config of a Qwen3-like mixture of experts."""
    hidden, experts = config["hidden_size"], config["num_experts"]
    width, head = config["moe_intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    weights = [Weight("model.embed_tokens.weight", (config["vocab_size"], hidden))]
    for layer in range(config["num_hidden_layers"]):
        shapes: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (queries, hidden),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
            "self_attn.o_proj.weight": (hidden, queries),
            "self_attn.q_norm.weight": (head,),
            "self_attn.k_norm.weight": (head,),
            "mlp.gate.weight": (experts, hidden),
            "mlp.experts.gate_up_proj": (experts, 2 * width, hidden),
            "mlp.experts.down_proj": (experts, hidden, width),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        weights += [Weight(f"model.layers.{layer}.{name}", shape) for name, shape in shapes.items()]
    weights += [
        Weight("model.norm.weight", (hidden,)),
        Weight("lm_head.weight", (config["vocab_size"], hidden)),
    ]
    return Model(tuple(weights), config)


def plan_model(asked: Any, settings: Settings, support: Any, megatron: Any = None) -> Any:
    """Plan a Megatron model of a verl job, with the features that would be in force here."""
    job = Job("verl", "verl.trainer.main_ppo", None, (), (), settings)
    releases = (".".join(map(str, one)) if one else None for one in (support.version, megatron))
    return asked.plan(job, Rules(*releases))
