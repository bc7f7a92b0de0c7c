"""Compute how Megatron splits a model over GPUs, from names, shapes and group sizes.

Expert and expert-tensor parallelism split experts; tensor parallelism splits matrices and biases
of column-parallel layers. Norms, routers and latent attention's down-projections stay whole. Stages
get layers as in ``get_num_layers_to_build`` and ``get_transformer_layer_offset``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..shapes import Model, Weight, is_router
from .sizes import Sizes

_COUNTS = (
    *("world", "tensor", "pipeline", "context", "expert", "expert_tensor"),
    *("virtual", "first", "last"),
)


def fault(sizes: Sizes, model: Model, *, heads_are_shared: bool = True) -> str:
    """Return why a model cannot be split over the GPUs, with the config's key; empty if it can.

    ``heads_are_shared`` is whether several ranks may share a key-value head.
    """
    for name in _COUNTS:
        size, least = getattr(sizes, name), 0 if name in ("first", "last") else 1
        if size is not None and (type(size) is not int or size < least):
            key = sizes.keys.get(name, name)
            return f"{key}={size!r}: expected a whole number, at least {least}"
    key, found = next(_faults(sizes, model, heads_are_shared), ("", ""))
    return f"{sizes.keys.get(key, key)}: {found}" if found else ""


def _faults(sizes: Sizes, model: Model, shared: bool) -> Iterator[tuple[str, str]]:
    dense = sizes.tensor * sizes.pipeline * sizes.context
    experts = sizes.experts_tensor * sizes.expert * sizes.pipeline
    gpus = f"{sizes.world} GPUs are no multiple of"
    if sizes.world % dense:
        yield "world", f"{gpus} {dense}, which is tensor x pipeline x context"
    if sizes.world % experts:
        yield "expert", f"{gpus} {experts}, which is expert tensor x expert x pipeline"
    heads = model.number("num_attention_heads", "n_head")
    groups = model.number("num_key_value_heads") or heads
    if heads % sizes.tensor:
        yield "tensor", f"{heads} attention heads cannot be split {sizes.tensor} ways"
    if groups % sizes.tensor and (sizes.tensor % groups or not shared):
        yield "tensor", f"{groups} key-value heads cannot be split {sizes.tensor} ways"
    if model.experts % sizes.expert:
        yield "expert", f"{model.experts} experts cannot be split {sizes.expert} ways"
    if model.config and not layers_of_stages(sizes, number_of_layers(model)):
        layers = number_of_layers(model)
        yield "pipeline", f"{layers} layers cannot be split into these {sizes.pipeline} stages"


_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
OTHER_MODEL = re.compile(
    r"(^|\.)(visual|vision_tower|vision_model|vision|audio_tower|audio|multi_modal_projector"
    r"|mm_projector|embed_vision)\."
)


def layer_of(name: str) -> int | None:
    """The index of a parameter's layer; ``None`` outside the layers of the text model."""
    match = None if OTHER_MODEL.search(name) else _LAYER.search(name)
    return int(match.group(1)) if match else None


def number_of_layers(model: Model) -> int:
    """Number of layers of the text model, without the layers for multi-token prediction."""
    told = model.number("num_hidden_layers", "n_layer")
    return told or 1 + max((layer_of(weight.name) or 0 for weight in model.weights), default=0)


def layers_of_stages(sizes: Sizes, layers: int) -> list[list[int]]:
    """The indices of the layers of each pipeline stage; empty if the layers cannot be split."""
    lengths = _lengths(sizes, layers)
    if sum(lengths) != layers or min(lengths) < 0 or len(lengths) % sizes.pipeline:
        return []
    stages: list[list[int]] = [[] for _ in range(sizes.pipeline)]
    first = 0
    for place, length in enumerate(lengths):
        stages[place % sizes.pipeline] += range(first, first + length)
        first += length
    return stages


def _lengths(sizes: Sizes, layers: int) -> list[int]:
    """Number of layers in each chunk of the stages, in the order of the layers."""
    if sizes.stages:
        return [place.count("t") for place in _places(sizes.stages)]
    chunks = (sizes.virtual or 1) if sizes.pipeline > 1 else 1
    both = ((0, sizes.first), (sizes.pipeline - 1, sizes.last))
    ends = {stage: number for stage, number in both if number is not None}
    counted = layers + sizes.count_embedding + sizes.count_loss - sum(ends.values())
    each = counted // max(sizes.pipeline - len(ends), 1)
    lengths = [ends.get(stage, each) // chunks for stage in range(sizes.pipeline)] * chunks
    lengths[0] -= sizes.count_embedding
    lengths[-1] -= sizes.count_loss
    return lengths


def _places(layout: str | Sequence[Sequence[str]]) -> Sequence[str]:
    """The chunks of a pipeline layout, each with a letter ``t`` for a layer."""
    if not isinstance(layout, str):
        return ["t" * list(place).count("decoder") for place in layout]
    for part in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        layout = re.sub(part, lambda found: found.group(1) * int(found.group(2)), layout)
    return layout.split("|")


_COLUMN = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "qkv", "c_attn", "g_proj"),
    *("q_b_proj", "kv_b_proj", "sinks", "A_log", "dt_bias", "D", "conv1d"),
    *("gate_proj", "up_proj", "gate_up_proj", "gate_up_proj_bias", "fc1", "w1", "w3", "c_fc"),
    *("wq", "wk", "wv"),
    *("in_proj", "in_proj_qkvz", "in_proj_qkv", "in_proj_ba", "in_proj_z"),
    *("in_proj_a", "in_proj_b", "linear_in", "linear_out"),
)
"""Column-parallel layers: tensor parallelism splits the outputs of the weight, and the bias."""

_ROW = ("o_proj", "wo", "down_proj", "fc2", "w2", "c_proj", "out_proj", "dense")
"""Row-parallel layers: tensor parallelism splits the inputs of the weight; the bias stays whole."""

EMBEDDINGS = ("embed_tokens", "wte", "tok_embeddings", "word_embeddings", "embeddings", "embed_in")
OUTPUTS = ("lm_head", "embed_out")
_VOCABULARY = (*EMBEDDINGS, *OUTPUTS, "output")
_LAST = ("norm", "norm_f", "ln_f", "final_layernorm", "final_layer_norm", "score")
"""Modules after the last layer; the last pipeline stage contains them and the output layer."""


def rank_numel(weight: Weight, sizes: Sizes) -> int:
    """Number of a parameter's elements on one rank of the parameter's pipeline stage."""
    word = word_of(weight.name)
    if is_expert(weight.name):
        ways = 1 if word == "down_proj_bias" else sizes.experts_tensor
        return weight.numel // (sizes.expert * ways)
    split = word in _VOCABULARY or word in _COLUMN or (word in _ROW and len(weight.shape) > 1)
    whole = not split or OTHER_MODEL.search(weight.name)
    return weight.numel if whole else weight.numel // sizes.tensor


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to routed experts, by its name."""
    return ".experts." in name or name.startswith("experts.")


@dataclass(frozen=True)
class StageCount:
    """Numbers of parameters on a rank of one pipeline stage.

    Attributes:
        dense: trained parameters whose optimizer states the data-parallel group shards.
        experts: parameters of experts, if a separate data-parallel group shards their states.
        frozen: parameters that are not trained; not counted in ``dense``.
    """

    dense: int = 0
    experts: int = 0
    frozen: int = 0


def count(
    model: Model, sizes: Sizes, *, frozen_routers: bool = False, value_head: bool = False
) -> list[StageCount]:
    """Count the parameters on one rank of each pipeline stage; ``sizes`` must be legal.

    ``frozen_routers``: the routers of experts are not trained. ``value_head``: the output layer is
    a value head with one output.
    """
    if not model.config:
        return _evenly(model, sizes)
    stage_of = {
        layer: stage
        for stage, numbers in enumerate(layers_of_stages(sizes, number_of_layers(model)))
        for layer in numbers
    }
    dense, experts, still = ([0] * sizes.pipeline for _ in range(3))
    last = sizes.pipeline - 1
    for weight in model.weights:
        layer, word = layer_of(weight.name), word_of(weight.name)
        if layer is not None:
            stages = [stage_of[layer]] if layer in stage_of else []  # none: multi-token prediction
        elif value_head and word in (*OUTPUTS, "score", "v_head"):
            stages = []
        else:
            ends = {*_LAST, *OUTPUTS}.intersection(weight.name.split("."))
            at_end = bool(ends) and not OTHER_MODEL.search(weight.name)
            stages = [last if at_end else 0]
            if word in EMBEDDINGS and model.tied and last and not value_head:
                stages.append(last)  # the last stage has its own copy of tied weights
        for stage in stages:
            numel = rank_numel(weight, sizes)
            if not weight.trains or (frozen_routers and is_router(weight.name)):
                still[stage] += numel
            elif is_expert(weight.name) and sizes.expert > 1:
                experts[stage] += numel
            else:
                dense[stage] += numel
    if value_head:
        dense[last] += model.number("hidden_size", "n_embd")
    return [StageCount(*counts) for counts in zip(dense, experts, still, strict=True)]


def _evenly(model: Model, sizes: Sizes) -> list[StageCount]:
    ways = (sizes.tensor, sizes.experts_tensor * sizes.expert)
    numel = {(experts, trains): 0 for experts in (False, True) for trains in (False, True)}
    for weight in model.weights:
        numel[is_expert(weight.name), weight.trains] += weight.numel
    own, still, theirs, their_still = (
        -(-numel[experts, trains] // (ways[experts] * sizes.pipeline))
        for experts in (False, True)
        for trains in (True, False)
    )
    apart = sizes.expert > 1
    dense, experts = (own, theirs) if apart else (own + theirs, 0)
    return [StageCount(dense, experts, still + their_still)] * sizes.pipeline


_FACTOR = re.compile(r"\.lora_[AB](\.default)?(?=\.)")


def word_of(name: str) -> str:
    """The module of a parameter; of a factor of an adapter the module that it adapts."""
    name = _FACTOR.sub("", name)
    return name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
