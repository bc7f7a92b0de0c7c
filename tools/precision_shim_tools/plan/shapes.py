"""Read the names and shapes of a model's parameters: transformers builds the model without weights.

Of equal layers, only the first is built, in architectures whose config tells which layers are
equal. Equal parameters of several experts are one ``Weight`` with a count, so the number of
``Weight`` objects does not depend on the number of experts.
"""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

from precision_shim.errors import PlanError
from precision_shim.files.models import EXPERT_COUNTS

from .values import said

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_ROUTER = re.compile(r"\.(gate|router|router\.layer|gate\.wg|router\.classifier)\.(weight|bias)$")
_LAYER = re.compile(r"\blayers\.(\d+)\.")

_LAYERS_IN_CONFIG = (
    "dots1 deepseek_v2 deepseek_v3 ernie4_5_moe gemma2 glm4_moe gpt_oss llama mistral mixtral olmoe"
    " qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next"
)
"""Architectures (``model_type``) whose layers have equal parameters if ``_kinds`` are equal."""


@dataclass(frozen=True)
class Weight:
    """A parameter, or parameters of several experts that have the same shape.

    Attributes:
        name: the parameter's name in transformers, with ``*`` in place of an expert's number.
        repeated: number of equal parameters.
        trains: whether the job trains the parameter, if it trains the model.
    """

    name: str
    shape: tuple[int, ...]
    repeated: int = 1
    trains: bool = True

    @property
    def numel(self) -> int:
        """Number of elements in all ``repeated`` parameters together."""
        return prod(self.shape) * self.repeated


@dataclass(frozen=True)
class Model:
    """A model's parameters and config.

    Attributes:
        config: the Hugging Face config, merged with its text model's config.
        source: the file from which the names and shapes were read.
        tied: whether the output layer shares its weight with the embedding.
        kept: names of the modules whose parameters transformers loads in fp32 into a 16-bit model.
        note: what is not counted; may be empty.
    """

    weights: tuple[Weight, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    tied: bool = False
    kept: tuple[str, ...] = ()
    note: str = ""

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        return sum(weight.numel for weight in self.weights)

    def number(self, *keys: str) -> int:
        """Return the first nonzero whole number under ``keys``; 0 if there is none."""
        return next(filter(None, (_whole(self.config.get(key)) for key in keys)), 0)

    @property
    def experts(self) -> int:
        """Number of routed experts of a layer; 0 for a dense model."""
        return self.number(*EXPERT_COUNTS)

    def frozen(self) -> Model:
        """The model without trained parameters, as beneath adapters that are yet to be added."""
        note = "not counted: the LoRA adapters, whose size --parameters does not say; --model does"
        weights = tuple(replace(weight, trains=False) for weight in self.weights)
        return replace(self, weights=weights, note="" if self.config else note)


Adapt = Callable[[Any], Any]
"""Puts LoRA adapters into a model of transformers, and freezes the rest, as a worker does."""


def with_peft(asked: Mapping[str, Any], model: Any, *, value_head: bool = False) -> Any:
    """Apply peft's LoRA to a model.

    Args:
        asked: LoraConfig's arguments, or only the ``path`` of trained adapters.
        model: a model of transformers.
        value_head: whether a value head replaces its output layer; adapters freeze it, too.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    path = asked.get("path")
    config = LoraConfig.from_pretrained(path) if path else LoraConfig(**asked)
    config.inference_mode = False
    if value_head:
        width = model.get_output_embeddings().weight.shape[1]
        model.set_output_embeddings(torch.nn.Linear(width, 1, bias=False))
        model.get_output_embeddings = lambda: None  # "all-linear" leaves an output layer out
    return get_peft_model(model, config)


def read_model(
    directory: Path, overrides: Mapping[str, Any] | None = None, adapt: Adapt | None = None
) -> Model:
    """Read the model in the directory of a ``config.json``, whose values ``overrides`` replaces.

    Raises:
        PlanError: the file cannot be read, or transformers cannot build the model.
    """
    path = directory / "config.json"
    try:
        config = {**json.loads(path.read_text(encoding="utf-8")), **(overrides or {})}
    except (OSError, ValueError, TypeError) as error:
        raise PlanError(
            f"{path}: cannot be read ({error}); expected a model's config. Name its directory with "
            "--model, or its size with --parameters."
        ) from error
    return from_config(config, str(path), adapt)


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text model's config, merged over the keys of the outer config."""
    for key in ("text_config", "llm_config", "language_config", "thinker_config"):
        inner = config.get(key)
        if isinstance(inner, Mapping):
            return {**config, **text_config(inner)}
    return dict(config)


def _whole(value: object) -> int:
    """Return a config's value if it is a whole number; 0 for other values, such as a list."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def is_router(name: str) -> bool:
    """Whether a parameter belongs to a router, by its name."""
    return bool(_ROUTER.search(name))


_built: dict[tuple[str, Adapt | None], Model] = {}
"""Maps configs as JSON to their models: a job has several of one config, and a build takes time."""

_ADAPTED = re.compile(r"^base_model\.model\.|\.base_layer(?=\.)")
"""What peft adds to the names of the parameters that it freezes."""


def from_config(config: Mapping[str, Any], where: str, adapt: Adapt | None = None) -> Model:
    """Build a model on torch's meta device from a Hugging Face config that stands in ``where``.

    Raises:
        PlanError: transformers cannot build the model, or it cannot get the adapters.
    """
    key = json.dumps(config, sort_keys=True, default=repr), adapt
    if key not in _built:
        _built[key] = _build(config, where, adapt)
    return replace(_built[key], source=f"{where}, built on the meta device")


def _build(config: Mapping[str, Any], where: str, adapt: Adapt | None = None) -> Model:
    written = {key: value for key, value in config.items() if key != "quantization_config"}
    kind = str(written.pop("model_type", ""))
    try:
        import torch
        from transformers import AutoConfig

        made = AutoConfig.for_model(kind, **written)
        # LoRA's keys may name single layers.
        kinds = _kinds(made) if kind in _LAYERS_IN_CONFIG.split() and adapt is None else []
        with torch.device("meta"):
            model = _class_of(made).from_config(_of_first_layers(made, kinds) if kinds else made)
    except Exception as error:  # transformers is missing, or its code for a model fails
        raise PlanError(
            f"{where}: transformers cannot build a model of model_type={kind!r} "
            f"({said(error)}). Name the model's size with --parameters."
        ) from error
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    tied = output is not None and output.weight is embedding.weight
    try:
        with torch.device("meta"):
            model = model if adapt is None else adapt(model)
    except Exception as error:  # peft and others refuse targets with various errors
        raise PlanError(
            f"{where}: its model cannot get the LoRA adapters ({said(error)}). Correct their keys, "
            "or plan in the environment of the job."
        ) from error
    parameters = ((_ADAPTED.sub("", name), one) for name, one in model.named_parameters())
    counted = Counter(
        (_EXPERT.sub(".experts.*.", name), tuple(one.shape), one.requires_grad)
        for name, one in parameters
    )
    built = [
        Weight(name, shape, number, trains) for (name, shape, trains), number in counted.items()
    ]
    weights = tuple(_repeated(built, kinds))
    names = [weight.name for weight in weights]
    marks = sorted(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    patterns = {mark: mark.replace("*", ".*") for mark in marks}
    kept = tuple(one for one in marks if any(re.search(patterns[one], name) for name in names))
    return Model(weights, text_config(config), tied=tied, kept=kept)


def _kinds(config: Any) -> list[Any]:
    """For each layer, the values of the config by which a layer's modules are chosen."""
    size, given = config.num_hidden_layers, vars(config)
    per_layer = [one for one in given.values() if isinstance(one, list) and len(one) == size]
    interval = given.get("moe_layer_interval", 1)
    first, last = given.get("moe_layer_start_index", 0), given.get("moe_layer_end_index", size)
    return [
        (
            *(one[layer] for one in per_layer),
            layer in (given.get("mlp_only_layers") or ()),
            layer < given.get("first_k_dense_replace", 0),
            (layer + 1) % (given.get("decoder_sparse_step") or 1),
            first <= layer <= last and (layer + 1) % interval == 0,
        )
        for layer in range(size)
    ]


def _of_first_layers(config: Any, kinds: list[Any]) -> Any:
    """Return the config of the model's first layers, of which there is one of each kind."""
    first, whole = copy.deepcopy(config), len(kinds)
    first.num_hidden_layers = 1 + max(map(kinds.index, kinds))
    for key, value in vars(first).items():
        if isinstance(value, list) and len(value) == whole:
            setattr(first, key, value[: first.num_hidden_layers])
    return first


def _repeated(built: list[Weight], kinds: list[Any]) -> Iterator[Weight]:
    """Yield the weights of all layers, in their order; those of a layer are of its kind's first."""
    for of_layers, weights in groupby(built, lambda one: bool(kinds and _LAYER.search(one.name))):
        if not of_layers:
            yield from weights
            continue
        first = {
            layer: list(own)
            for layer, own in groupby(weights, lambda one: _LAYER.findall(one.name)[0])
        }
        for layer, kind in enumerate(kinds):
            for one in first[str(kinds.index(kind))]:
                yield replace(one, name=_LAYER.sub(f"layers.{layer}.", one.name, count=1))


def _class_of(config: Any) -> Any:
    """The class of transformers that builds a model of a config, which may also be for vision."""
    import transformers

    names = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForVision2Seq")
    for kind in (getattr(transformers, name, None) for name in names):
        if kind is not None and type(config) in getattr(kind, "_model_mapping", {}):
            return kind
    return transformers.AutoModel


def of_size(text: str) -> Model:
    """Return a model of a given size, such as ``"30e9,experts=29e9"``, without names and shapes.

    Raises:
        PlanError: the text does not state a size.
    """
    first, _, rest = text.partition(",")
    key, _, value = rest.partition("=")
    total, experts = _number(first), _number(value) if rest else 0
    if (rest and key.strip() != "experts") or not 0 <= experts < total:
        raise PlanError(
            f"--parameters {text!r}: expected N or N,experts=M, such as 7.6B or 30.5B,experts=29B, "
            "where M, the parameters of all routed experts, is a part of N."
        )
    weights = [Weight("unknown", (total - experts,))]
    if experts:
        weights.append(Weight("experts.*.unknown", (1,), experts))
    return Model(tuple(weights), {}, f"--parameters {text}")


def _number(text: str) -> int:
    """A number of parameters, such as ``7.6B``; -1 if the text is no number."""
    word = text.strip().upper().replace("_", "")
    unit = {"T": 10**12, "B": 10**9, "M": 10**6, "K": 10**3}.get(word[-1:], 1)
    try:
        return round(float(word[:-1] if unit > 1 else word) * unit)
    except (ValueError, OverflowError):
        return -1
