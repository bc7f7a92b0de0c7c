"""How AReaL splits a model's layers over pipeline stages: by parameters, not by number.

AReaL's engine estimates the parameters of embedding, layers and output layer, and searches the
split whose largest stage is smallest. The plan calls the engine's own functions.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from precision_shim.planning.shapes import Model

from .megatron.planning.layout import number_of_layers
from .megatron.planning.sizes import Sizes

_MODULE = "areal.engine.megatron_utils.pipeline_parallel"
_UNEQUAL = ("first_k_dense_replace", "mlp_only_layers", "n_shared_experts")
"""Keys of Hugging Face configs with which AReaL's estimate needs more than the plan knows."""


def split(model: Model, sizes: Sizes) -> tuple[Sizes, tuple[str, ...]]:
    """Return the sizes with AReaL's split in ``stages``, and notes if the split is not known.

    Args:
        model: names and shapes.
        sizes: the sizes of the parallel groups.
    """
    if sizes.pipeline < 2:
        return sizes, ()
    unknown = (
        "not planned: AReaL splits the layers over the stages by their size; they are counted as "
        "evenly split",
    )
    if not model.config or _unequal(model.config):
        return sizes, unknown
    chunks = sizes.pipeline * (sizes.virtual or 1)
    lengths = _lengths(model, sizes, chunks)
    if lengths is None:
        return sizes, unknown
    if not lengths:  # AReaL leaves the split to Megatron
        return sizes, ()
    places = [["decoder"] * length for length in lengths]
    places[0] = ["embedding", *places[0]]
    places[-1] = [*places[-1], "loss"]
    return replace(sizes, stages=places), ()


def _unequal(config: Mapping[str, Any]) -> bool:
    sparse = config.get("decoder_sparse_step") or 1
    return sparse != 1 or any(config.get(name) for name in _UNEQUAL)


def _lengths(model: Model, sizes: Sizes, chunks: int) -> Sequence[int] | None:
    """The number of layers in each chunk, in the order of the layers; ``None`` if unknown."""
    config = model.config
    try:
        theirs: Any = importlib.import_module(_MODULE)
        transformers: Any = importlib.import_module("transformers")
        whole = {key: value for key, value in config.items() if key != "model_type"}
        known = transformers.AutoConfig.for_model(str(config.get("model_type")), **whole)
        ours = SimpleNamespace(
            num_layers=number_of_layers(model),
            gated_linear_unit=True,
            num_moe_experts=model.experts or None,
            moe_ffn_hidden_size=config.get("moe_intermediate_size"),
            moe_shared_expert_intermediate_size=config.get("shared_expert_intermediate_size"),
            expert_model_parallel_size=sizes.expert,
        )
        weights, first, last = theirs.estimate_stage_parameter_buckets(known, ours)
        if not weights:
            return []
        found: list[int] = theirs._compute_stage_layer_lengths(weights, first, last, chunks)
    except Exception:  # whatever the framework's functions miss in this config
        return None
    return found
