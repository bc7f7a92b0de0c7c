"""Add to a model the parameters of Megatron-Bridge's LoRA, and freeze all others.

Megatron-Bridge's classes need TransformerEngine and a built model, so the adapters' shapes come
from the matrices in Hugging Face's names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from precision_shim.errors import PlanError

from ..shapes import Model, Weight
from .layout import EMBEDDINGS, OTHER_MODEL, OUTPUTS, is_expert, layer_of, word_of
from .sizes import Sizes

_FUSED = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "qkv", "c_attn"),
    "linear_fc1": ("gate_proj", "up_proj", "gate_up_proj", "fc1", "w1", "w3", "c_fc"),
}
_SEPARATE = {
    "linear_q": ("q_proj",),
    "linear_k": ("k_proj",),
    "linear_v": ("v_proj",),
    "linear_fc1_gate": ("gate_proj", "gate_up_proj"),
    "linear_fc1_up": ("up_proj", "gate_up_proj"),
}
_BOTH = {
    "linear_proj": ("o_proj", "wo", "dense"),
    "linear_fc2": ("down_proj", "fc2", "w2"),
    "linear_q_down_proj": ("q_a_proj",),
    "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "linear_kv_up_proj": ("kv_b_proj",),
    # Not Qwen3-Next's fused in_proj_qkvz, whose adapters Megatron-Bridge cannot export.
    "in_proj": ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b"),
    "out_proj": ("out_proj",),
    "router": ("gate", "router"),
}
"""Each maps Megatron's modules to the matrices in them, in Hugging Face's names."""
_DEFAULT = (*_FUSED, *_SEPARATE, "linear_proj", "linear_fc2")
_NOT_PARALLEL = ("router", "linear_q_down_proj", "linear_kv_down_proj")
"""Modules that an empty list of targets, which stands for parallel layers, does not include."""


def adapted(model: Model, asked: Mapping[str, Any], sizes: Sizes, where: str) -> Model:
    """Return the model with LoRA adapters, made with Megatron-Bridge's arguments ``asked``.

    Raises:
        PlanError: the adapters are of another kind than LoRA, or have no rank.
    """
    kind, rank = asked.get("type") or "lora", asked.get("dim") or asked.get("rank")
    if type(rank) is not int or rank < 1:
        raise PlanError(f"{where}: LoRA of rank {rank!r}: expected a whole number. Write it.")
    if kind not in ("lora", "canonical_lora"):
        raise PlanError(
            f"{where}: the size of {kind} adapters is not known here; planned are lora and "
            "canonical_lora. Plan the job with one of these."
        )
    table = {**_BOTH, **(_FUSED if kind == "lora" else _SEPARATE)}
    if model.number("kv_lora_rank"):  # latent attention has no module with all three matrices
        table |= {"linear_qkv": (), "linear_q_proj": ("q_proj",)}
    found: dict[tuple[str, str], list[int]] = {}
    for weight in model.weights if model.config else ():
        word = word_of(weight.name)
        head = {"output_layer": EMBEDDINGS if model.tied else OUTPUTS}
        if len(weight.shape) < 2 or OTHER_MODEL.search(weight.name) or word.endswith("_bias"):
            continue
        for module, words in (head if layer_of(weight.name) is None else table).items():
            owner, *_ = weight.name.rpartition(word)
            if word in words and _is_target(module, owner, asked):
                *_, out, into = weight.shape
                halved = kind != "lora" and word == "gate_up_proj"
                found.setdefault((owner, module), [into, 0])[1] += out // (2 if halved else 1)
    still, asked = model.frozen(), {**asked, "rank": rank}
    made = (_factors(*both, asked, model, sizes) for both in found.items())
    return replace(still, weights=(*still.weights, *(one for pair in made for one in pair)))


def _is_target(module: str, owner: str, asked: Mapping[str, Any]) -> bool:
    place = "mlp" if "fc" in module or module == "router" else "self_attention"
    place += ".experts" if is_expert(owner) else ".shared_experts" * ("shared_expert" in owner)
    name = f"decoder.layers.{layer_of(owner)}.{place}.{module}"
    targets, excluded = asked.get("target_modules"), asked.get("exclude_modules") or ()
    if targets is None:
        targets = _DEFAULT
    if targets:
        return any(one == module or fnmatchcase(name, one) for one in targets)
    others = any(one == module or fnmatchcase(name, one) for one in excluded)
    return not (others or is_expert(owner) or module in _NOT_PARALLEL)


def _factors(
    place: tuple[str, str],
    matrix: Sequence[int],
    asked: Mapping[str, Any],
    model: Model,
    sizes: Sizes,
) -> Iterator[Weight]:
    """Yield both factors of an adapter; tensor parallelism splits both, as for no other matrix."""
    (owner, module), (into, out), rank = place, matrix, asked["rank"]
    first, outer = "fc1" in module, asked.get("experts_shared_outer_loras")
    # The experts of a rank share one adapter, unless the config gives each of them its own.
    shared, each = (sizes.expert, model.experts) if is_expert(owner) else (1, 1)
    own = not asked.get("share_expert_adapters", True)
    apart = (not first, first) if outer else (own, own)
    if is_expert(owner) and asked.get("normalize_moe_lora"):
        ways = sizes.experts_tensor if first else 1
        topk = model.number("num_experts_per_tok", "moe_router_topk", "top_k") or 1
        rank = -(-(rank // topk) // ways) * ways
    shapes = {"linear_in": (rank, into), "linear_out": (out, rank)}
    for (name, shape), alone in zip(shapes.items(), apart, strict=True):
        yield Weight(f"{owner}{module}.{name}.weight", shape, each if alone else shared)
