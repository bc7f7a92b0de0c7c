"""Compute how Megatron splits a model over GPUs, from names, shapes and group sizes.

Expert and expert-tensor parallelism split experts. Tensor parallelism splits matrices and the
biases of column-parallel layers. Norms, routers and the down-projections of latent attention stay
whole. Pipeline parallelism splits layers into stages, as Megatron's ``get_num_layers_to_build`` and
``get_transformer_layer_offset`` do. The first and the last stage may have another number of layers
than the middle stages, and a stage may consist of interleaved chunks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from precision_shim.planning.record import Problem
from precision_shim.planning.shapes import Model, Weight, is_router

from .sizes import LEAST, Sizes, divisors

Report = Callable[[str, str, str, str], None]
"""A function that reports a problem; its arguments are code, key, message and remedy."""


SHARED_HEADS_SINCE = (0, 16)
"""The first megatron-core release in which several ranks may share a key-value head."""


def problems(
    sizes: Sizes, model: Model, subject: str, megatron: tuple[int, ...] | None = None
) -> list[Problem]:
    """List the problems because of which Megatron refuses a model with these group sizes.

    Args:
        sizes: the sizes of the parallel groups.
        model: names and shapes.
        subject: the model's name, for messages.
        megatron: megatron-core's release; ``None`` for the newest known release.
    """
    told: list[Problem] = []

    def report(code: str, key: str, message: str, remedy: str) -> None:
        told.append(Problem(code, subject, sizes.key(key), message, remedy))

    for name, least in LEAST.items():
        size = getattr(sizes, name)
        if size is None or (type(size) is int and size >= least):
            continue
        found_here = f"{sizes.key(name)}={size!r}: expected a whole number, at least {least}"
        report("size", name, found_here, f"Write {least} or more.")
    if told:
        return told
    _check_world(sizes, report)
    _check_heads(sizes, model, megatron, report)
    _check_widths(sizes, model, report)
    _check_layers(sizes, model, report)
    return told


def _check_world(sizes: Sizes, report: Report) -> None:
    product = sizes.tensor * sizes.pipeline * sizes.context
    if sizes.world % product:
        report(
            "world-size",
            "world",
            f"{sizes.world} GPUs are not a multiple of {product}, which is tensor {sizes.tensor} "
            f"x pipeline {sizes.pipeline} x context {sizes.context}",
            f"Take a multiple of {product} GPUs, or smaller groups.",
        )
    product = sizes.experts_tensor * sizes.expert * sizes.pipeline
    if sizes.world % product:
        report(
            "world-size",
            "expert",
            f"{sizes.world} GPUs are not a multiple of {product}, which is expert tensor "
            f"{sizes.experts_tensor} x expert {sizes.expert} x pipeline {sizes.pipeline}",
            f"Take a multiple of {product} GPUs, or smaller groups.",
        )


def _check_heads(
    sizes: Sizes, model: Model, megatron: tuple[int, ...] | None, report: Report
) -> None:
    shared = megatron is None or megatron >= SHARED_HEADS_SINCE
    heads = model.number("num_attention_heads", "n_head")
    groups = model.number("num_key_value_heads") or heads
    if heads % sizes.tensor:
        report(
            "heads",
            "tensor",
            f"{heads} attention heads cannot be split {sizes.tensor} ways",
            f"Take one of {divisors(heads)}.",
        )
    elif groups % sizes.tensor and (sizes.tensor % groups or not shared):
        since = ".".join(map(str, SHARED_HEADS_SINCE))
        report(
            "heads",
            "tensor",
            f"{groups} key-value heads cannot be split {sizes.tensor} ways"
            + (", nor shared evenly" if shared else f", nor shared before megatron-core {since}"),
            f"Take a divisor{' or a multiple' if shared else ''} of {groups} that divides {heads}.",
        )


def _check_widths(sizes: Sizes, model: Model, report: Report) -> None:
    experts = model.experts
    if sizes.expert > 1 and not experts and model.config:
        report(
            "experts",
            "expert",
            f"{sizes.key('expert')}={sizes.expert}, and the model has no experts",
            "Write 1.",
        )
    elif experts % sizes.expert:
        report(
            "experts",
            "expert",
            f"{experts} experts cannot be split {sizes.expert} ways",
            f"Take one of {divisors(experts)}.",
        )
    if experts and sizes.tensor > 1 and sizes.sequence_parallel is False:
        report(
            "sequence-parallel",
            "sequence_parallel",
            f"experts with tensor parallelism of {sizes.tensor} need sequence parallelism",
            f"Write {sizes.key('sequence_parallel')}: true.",
        )
    for keys, ways, name in (
        (("intermediate_size",), sizes.tensor, "tensor"),
        (("moe_intermediate_size",), sizes.experts_tensor, "expert_tensor"),
        (("vocab_size",), 1 if sizes.pads_vocabulary else sizes.tensor, "tensor"),
    ):
        width = model.number(*keys)
        if width % ways:
            report(
                "width",
                name,
                f"{keys[0]} of {width} cannot be split {ways} ways",
                "Take a divisor of it.",
            )


def _check_layers(sizes: Sizes, model: Model, report: Report) -> None:
    if not model.config:
        return
    layers = number_of_layers(model)
    try:
        layers_of_stages(sizes, layers)
    except ValueError as error:
        key = "pipeline"
        if sizes.stages:
            key = "stages"
        elif sizes.virtual:
            key = "virtual"
        report("layers", key, str(error), _pipeline_remedy(sizes, layers))


def _pipeline_remedy(sizes: Sizes, layers: int) -> str:
    if sizes.stages:
        return f"Correct {sizes.key('stages')}, or leave it out."
    rest = layers % sizes.pipeline
    ends = ""
    if rest and sizes.pipeline > 1 and "last" in sizes.keys:
        each = layers // (sizes.pipeline - 1)
        last = layers - each * (sizes.pipeline - 1)
        if last > 0:
            ends = f", or {sizes.key('last')}: {last}"
    return f"Take a divisor of {layers}{ends}."


_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_OTHER_MODEL = re.compile(
    r"(^|\.)(visual|vision_tower|vision_model|vision|audio_tower|audio|multi_modal_projector"
    r"|mm_projector|embed_vision)\."
)


def layer_of(name: str) -> int | None:
    """The index of a parameter's layer; ``None`` outside the layers of the text model."""
    match = None if _OTHER_MODEL.search(name) else _LAYER.search(name)
    return int(match.group(1)) if match else None


def number_of_layers(model: Model) -> int:
    """Number of layers of the text model, without the layers for multi-token prediction."""
    told = model.number("num_hidden_layers", "n_layer")
    return told or 1 + max((layer_of(weight.name) or 0 for weight in model.weights), default=0)


def layers_of_stages(sizes: Sizes, layers: int) -> list[list[int]]:
    """The indices of the layers of each pipeline stage.

    Raises:
        ValueError: the layers cannot be split over the stages; the message has the reason.
    """
    if sizes.stages:
        return _by_layout(sizes, layers)
    chunks = sizes.virtual or 1
    if chunks > 1 and sizes.pipeline == 1:
        chunks = 1
    numbers = _numbers(sizes, layers, chunks)
    if min(min(number) for number in numbers) < 0 or sum(map(sum, numbers)) != layers:
        raise ValueError(f"{layers} layers do not come out over {sizes.pipeline} stages")
    stages: list[list[int]] = [[] for _ in range(sizes.pipeline)]
    first = 0
    for chunk in range(chunks):
        for stage in range(sizes.pipeline):
            count = numbers[stage][chunk]
            stages[stage] += range(first, first + count)
            first += count
    return stages


def _numbers(sizes: Sizes, layers: int, chunks: int) -> list[list[int]]:
    per_stage = _per_stage(sizes, layers)
    numbers = []
    for stage, number in enumerate(per_stage):
        if number % chunks:
            raise ValueError(f"{number} layers of stage {stage} are not a multiple of {chunks}")
        numbers.append([number // chunks] * chunks)
    if sizes.count_embedding:
        numbers[0][0] -= 1
    if sizes.count_loss:
        numbers[-1][-1] -= 1
    return numbers


def _per_stage(sizes: Sizes, layers: int) -> list[int]:
    ends = (sizes.first, sizes.last)
    if any(end is not None for end in ends):
        if sizes.count_embedding or sizes.count_loss:
            raise ValueError(
                "layers of the first or last stage do not go with counting embedding or loss"
            )
        middle = sizes.pipeline - sum(end is not None for end in ends)
        left = layers - sum(end or 0 for end in ends)
        if middle < 0 or left < 0 or (middle and left % middle) or (not middle and left):
            raise ValueError(f"{left} layers cannot be spread evenly over {middle} stages between")
        counts = [left // middle if middle else 0] * sizes.pipeline
        if sizes.first is not None:
            counts[0] = sizes.first
        if sizes.last is not None:
            counts[-1] = sizes.last
        return counts
    counted = layers + sizes.count_embedding + sizes.count_loss
    if counted % sizes.pipeline:
        raise ValueError(f"{counted} layers cannot be spread evenly over {sizes.pipeline} stages")
    return [counted // sizes.pipeline] * sizes.pipeline


_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def _letters(layout: object) -> str:
    """Convert a pipeline layout, written as letters or as lists of names, to letters."""
    if isinstance(layout, str):
        return layout.replace(",", "")
    try:
        places = [list(map(str, places_here)) for places_here in layout]  # type: ignore[attr-defined]
        return "|".join("".join(_LETTERS[name] for name in place) for place in places)
    except (TypeError, KeyError):
        names = ", ".join(_LETTERS)
        raise ValueError(
            f"{layout!r}: expected letters, or for each stage a list of {names}"
        ) from None


def _by_layout(sizes: Sizes, layers: int) -> list[list[int]]:
    text = _letters(sizes.stages)
    text = re.sub(
        r"\(([^)]+)\)\*(\d+)", lambda stages: stages.group(1) * int(stages.group(2)), text
    )
    text = re.sub(r"(.)\*(\d+)", lambda stages: stages.group(1) * int(stages.group(2)), text)
    if set(text) - set("Etm L|"):
        raise ValueError(f"{sizes.stages!r}: a layout has the letters E, t, m, L and | only")
    places = text.split("|")
    if len(places) % sizes.pipeline:
        raise ValueError(f"{len(places)} places are not a multiple of {sizes.pipeline} stages")
    if text.count("t") != layers:
        raise ValueError(f"{text.count('t')} layers in the layout, {layers} in the model")
    stages: list[list[int]] = [[] for _ in range(sizes.pipeline)]
    first = 0
    for number, place in enumerate(places):
        count = place.count("t")
        stages[number % sizes.pipeline] += range(first, first + count)
        first += count
    return stages


_COLUMN = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "qkv", "c_attn", "g_proj"),
    *("q_b_proj", "kv_b_proj", "sinks", "A_log", "dt_bias", "D", "conv1d"),
    *("gate_proj", "up_proj", "gate_up_proj", "gate_up_proj_bias", "fc1", "w1", "w3", "c_fc"),
    *("wq", "wk", "wv"),
    *("in_proj", "in_proj_qkvz", "in_proj_qkv", "in_proj_ba", "in_proj_z"),
    *("in_proj_a", "in_proj_b"),
)
"""Column-parallel layers: tensor parallelism splits the outputs of the weight, and the bias."""

_ROW = ("o_proj", "wo", "down_proj", "fc2", "w2", "c_proj", "out_proj", "dense")
"""Row-parallel layers: tensor parallelism splits the inputs of the weight; the bias stays whole."""

_VOCABULARY = (
    *("embed_tokens", "wte", "tok_embeddings", "word_embeddings", "embeddings", "embed_in"),
    *("lm_head", "embed_out", "output"),
)
_EMBEDDINGS = _VOCABULARY[:6]
_LAST = ("norm", "norm_f", "ln_f", "final_layernorm", "final_layer_norm", "score")
"""Modules after the last layer; the last pipeline stage contains them and the output layer."""


def rank_numel(weight: Weight, sizes: Sizes) -> int:
    """Number of a parameter's elements on one rank of the parameter's pipeline stage.

    Args:
        weight: the parameter.
        sizes: the sizes of the parallel groups.
    """
    if is_expert(weight.name):
        ways = 1 if weight.name.endswith("down_proj_bias") else sizes.experts_tensor
        return weight.numel // (sizes.expert * ways)
    return weight.numel // _ways(weight, sizes.tensor)


def _ways(weight: Weight, tensor: int) -> int:
    """Number of ranks over which tensor parallelism splits a parameter outside the experts."""
    words = [part for part in weight.name.split(".") if part not in ("weight", "bias")]
    word = words[-1] if words else ""
    if _OTHER_MODEL.search(weight.name):
        return 1
    split = word in _VOCABULARY or word in _COLUMN or (word in _ROW and len(weight.shape) > 1)
    return tensor if split else 1


def is_expert(name: str) -> bool:
    """Whether a parameter with this name belongs to a routed expert."""
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
    model: Model,
    sizes: Sizes,
    *,
    frozen: Callable[[str], bool] = lambda name: False,
    value_head: bool = False,
) -> list[StageCount]:
    """Count the parameters on one rank of each pipeline stage.

    Args:
        model: names and shapes.
        sizes: the sizes of the parallel groups, which must be legal.
        frozen: function that returns whether the parameter with a given name is frozen.
        value_head: whether the output layer is a value head with one output.
    """
    if not model.config:
        return _evenly(model, sizes)
    layers = number_of_layers(model)
    stage_of = {
        layer: stage
        for stage, numbers in enumerate(layers_of_stages(sizes, layers))
        for layer in numbers
    }
    dense, experts, still = ([0] * sizes.pipeline for _ in range(3))
    last = sizes.pipeline - 1

    def add(stage: int, weight: Weight) -> None:
        numel = rank_numel(weight, sizes)
        if is_expert(weight.name) and sizes.expert > 1:
            experts[stage] += numel
        elif frozen(weight.name):
            still[stage] += numel
        else:
            dense[stage] += numel

    for weight in model.weights:
        layer = layer_of(weight.name)
        if layer is not None:
            if layer in stage_of:  # layers for multi-token prediction have no stage
                add(stage_of[layer], weight)
            continue
        if value_head and _word(weight.name) in ("lm_head", "embed_out", "score", "v_head"):
            continue
        add(_stage_outside(weight.name, last), weight)
        embedding = _word(weight.name) in _EMBEDDINGS
        if embedding and model.tied and last and not value_head:
            add(last, weight)  # the last stage has its own copy of tied weights
    if value_head:
        dense[last] += model.number("hidden_size", "n_embd")
    return [StageCount(*counts) for counts in zip(dense, experts, still, strict=True)]


def _evenly(model: Model, sizes: Sizes) -> list[StageCount]:
    """Split a model's parameters evenly over the stages, for a model without a config."""
    dense = sum(weight.numel for weight in model.weights if not is_expert(weight.name))
    experts = sum(weight.numel for weight in model.weights if is_expert(weight.name))
    own = -(-dense // (sizes.tensor * sizes.pipeline))
    theirs = -(-experts // (sizes.experts_tensor * sizes.expert * sizes.pipeline))
    apart = sizes.expert > 1
    stage = StageCount(own if apart else own + theirs, theirs if apart else 0)
    return [stage] * sizes.pipeline


def _word(name: str) -> str:
    return name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]


def _stage_outside(name: str, last: int) -> int:
    """The stage of a parameter outside the layers: last for norm and output, else the first."""
    if _OTHER_MODEL.search(name):
        return 0
    return last if _word(name) in (*_LAST, "lm_head", "embed_out") else 0


def unknown(model: Model) -> list[str]:
    """List the text model's matrices that ``count`` does not split because no rule names them."""
    names = []
    for weight in model.weights:
        word = _word(weight.name)
        known = word in (*_COLUMN, *_ROW, *_VOCABULARY) or is_router(weight.name)
        whole = "norm" in word or re.search(r"(_a_proj|with_mqa|shared_expert_gate|^gate$)$", word)
        ours = not _OTHER_MODEL.search(weight.name) and not is_expert(weight.name)
        if ours and len(weight.shape) > 1 and not known and not whole:
            names.append(_LAYER.sub(".layers.N.", weight.name))
    return sorted(set(names))
