"""Equal layers are built once: the same parameters as transformers builds whole."""

from __future__ import annotations

from typing import Any

import pytest

from precision_shim_tools.plan import shapes

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "num_hidden_layers": 12,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **{"moe_num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
LATENT: dict[str, Any] = {
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4},
    **{"v_head_dim": 8, "n_group": 2, "topk_group": 1, "n_shared_experts": 1},
}
SPARSE: dict[str, Any] = {"decoder_sparse_step": 3, "mlp_only_layers": [2, 4]}

ARCHITECTURES: dict[str, tuple[dict[str, Any], int]] = {
    "llama": ({"attention_bias": True}, 1),
    "mistral": ({}, 1),
    "gemma2": ({"tie_word_embeddings": True}, 2),
    "qwen2": ({"use_sliding_window": True, "max_window_layers": 5}, 6),
    "qwen3": ({}, 1),
    "mixtral": (EXPERTS, 1),
    "olmoe": (EXPERTS, 1),
    "gpt_oss": (EXPERTS, 2),
    "qwen2_moe": ({**EXPERTS, **SPARSE, "shared_expert_intermediate_size": 16}, 6),
    "qwen3_moe": ({**EXPERTS, **SPARSE}, 6),
    "qwen3_next": ({**EXPERTS, "mlp_only_layers": [5]}, 6),
    "deepseek_v2": ({**EXPERTS, **LATENT, "first_k_dense_replace": 2}, 3),
    "deepseek_v3": ({**EXPERTS, **LATENT, "first_k_dense_replace": 3}, 4),
    "glm4_moe": ({**EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1}, 2),
    "dots1": ({**EXPERTS, **LATENT, "first_k_dense_replace": 2}, 3),
    "ernie4_5_moe": (
        {**EXPERTS, "moe_k": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 9}
        | {"moe_layer_interval": 2},
        2,
    ),
}
"""Maps a ``model_type`` to values of its config, and to the layers that are built of its twelve."""


def test_each_architecture_whose_layers_are_read_from_its_config_is_here() -> None:
    assert set(ARCHITECTURES) == {*shapes._LAYERS_IN_CONFIG.split()}


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
def test_equal_layers_are_built_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values, layers = ARCHITECTURES[kind]
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"needs transformers with {kind}")
    config = {**SMALL, **values, "model_type": kind}
    first, built = shapes._of_first_layers, []

    def spied(made: Any, kinds: list[Any]) -> Any:
        built.append(first(made, kinds))
        return built[-1]

    monkeypatch.setattr(shapes, "_of_first_layers", spied)
    reduced = shapes._build(config, "config.json")
    assert [one.num_hidden_layers for one in built] == [layers]
    monkeypatch.setattr(shapes, "_LAYERS_IN_CONFIG", "")
    assert shapes._build(config, "config.json") == reduced
    assert len(built) == 1
