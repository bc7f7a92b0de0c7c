"""Read the names and shapes of a model's parameters, from safetensors headers or transformers.

No weights are read. Equal parameters of several experts are one ``Weight`` with a count, so the
number of ``Weight`` objects does not depend on the number of experts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from ..checkpoints.safetensors import read_header
from ..errors import PlanError

EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
"""Keys under which a Hugging Face config may have the number of routed experts."""

_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_NO_PARAMETER = re.compile(
    r"(e_score_correction_bias|expert_bias|inv_freq|masked_bias|_scale_inv|_scale|_zero_point"
    r"|_scales|g_idx)$"
)
_FURTHER = re.compile(r"(?:^|\.)mtp\.")
_LAYER = re.compile(r"(?:^|model\.)layers\.(\d+)\.")
_OUTPUT = re.compile(r"(lm_head|embed_out|output)\.weight$")
_PACKED = re.compile(r"(_packed|qweight|qzeros|_blocks)$")


@dataclass(frozen=True)
class Weight:
    """A parameter, or parameters of several experts that have the same shape.

    Attributes:
        name: the parameter's name in transformers, with ``*`` in place of an expert's number.
        shape: the shape of one parameter.
        repeated: number of equal parameters.
    """

    name: str
    shape: tuple[int, ...]
    repeated: int = 1

    @property
    def numel(self) -> int:
        """Number of elements in all ``repeated`` parameters together."""
        return prod(self.shape) * self.repeated


@dataclass(frozen=True)
class Model:
    """A model's parameters and config.

    Attributes:
        weights: the parameters.
        config: the Hugging Face config, merged with its text model's config.
        source: the file or directory from which the names and shapes were read.
        tied: whether the output layer shares its weight with the embedding.
    """

    weights: tuple[Weight, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    tied: bool = False

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        return sum(weight.numel for weight in self.weights)

    def number(self, *keys: str) -> int:
        """Return the first nonzero whole number under ``keys``; 0 if there is none."""
        for key in keys:
            if count := _whole(self.config.get(key)):
                return count
        return 0

    @property
    def experts(self) -> int:
        """Number of routed experts of a layer; 0 for a dense model."""
        return self.number(*EXPERT_COUNTS)


def read_model(directory: Path, overrides: Mapping[str, Any] | None = None) -> Model:
    """Read the model in a directory.

    Args:
        directory: the directory of ``config.json``, with or without weights.
        overrides: values that override the config.

    Raises:
        PlanError: a file cannot be read or has unexpected content.
    """
    whole = _json(directory / "config.json")
    if overrides:
        return from_config({**whole, **overrides}, str(directory / "config.json"))
    config = text_config(whole)
    headers = list(_headers(directory)) if _is_whole(directory) else []
    if not headers or any(_PACKED.search(header.name) for header in headers):
        return from_config(whole, str(directory / "config.json"))
    # Without tie_word_embeddings, a model counts as tied if its files have no output layer.
    without = not any(_OUTPUT.search(header.name) for header in headers)
    tied = bool(config.get("tie_word_embeddings", without))
    several = len({header.name for header in headers}) > 1
    layers = config.get("num_hidden_layers")
    weights = tuple(
        header
        for header in headers
        if not _NO_PARAMETER.search(header.name)
        and not (tied and header.name.endswith("lm_head.weight") and several)
        and not _predicts_further(header.name, layers)
    )
    return Model(weights, config, f"safetensors headers in {directory}", tied)


def _is_whole(directory: Path) -> bool:
    """Whether all files in the index exist; after an interrupted download some are missing."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return True
    names = _json(index).get("weight_map")
    if not isinstance(names, dict):
        return True
    return all((directory / str(name)).is_file() for name in set(map(str, names.values())))


def _predicts_further(name: str, layers: object) -> bool:
    """Whether a parameter belongs to a multi-token prediction head, which transformers drops."""
    match = _LAYER.search(name)
    behind = match is not None and isinstance(layers, int) and int(match.group(1)) >= layers > 0
    return behind or bool(_FURTHER.search(name))


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text model's config, merged over the keys of the outer config."""
    for key in ("text_config", "llm_config", "language_config", "thinker_config"):
        inner = config.get(key)
        if isinstance(inner, Mapping):
            return {**config, **text_config(inner)}
    return dict(config)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(
            f"{path}: cannot be read ({error.strerror or error}); expected a model's config. Name "
            "its directory with --model, or its size with --parameters."
        ) from error
    except ValueError as error:
        raise PlanError(f"{path}: is no JSON: {error}. Repair it or fetch it again.") from error
    if not isinstance(content, dict):
        raise PlanError(f"{path}: expected a JSON object. Repair it or fetch it again.")
    return content


def _headers(directory: Path) -> Iterator[Weight]:
    counted: dict[tuple[str, tuple[int, ...]], int] = {}
    for path in sorted(directory.glob("*.safetensors")):
        if path.name.startswith(("consolidated", "adapter")):
            continue  # "consolidated*" has the weights under other names; "adapter*" has LoRA
        for name, shape in header(path):
            key = (_EXPERT.sub(".experts.*.", name), shape)
            counted[key] = counted.get(key, 0) + 1
    for (name, shape), number in counted.items():
        yield Weight(name, shape, number)


def header(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes in one safetensors file, without reading weights.

    Raises:
        PlanError: the file is no safetensors file.
    """
    try:
        entries, _ = read_header(path)
        for name, entry in entries.items():
            yield name, tuple(int(length) for length in entry["shape"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PlanError(
            f"{path}: is no safetensors file: {error}; expected its header of names and shapes. "
            "Fetch it again, or remove it: then config.json is read."
        ) from error


def fewest_experts(config: Mapping[str, Any]) -> int:
    """Return the smallest number of experts with which a model of this config can be built.

    A router needs at least as many experts as it selects for a token. A grouped router needs at
    least two experts in each group.
    """
    top = max((_whole(config.get(key)) for key in _PER_TOKEN), default=0) or 1
    groups = _whole(config.get("n_group")) or 1
    each = max(-(-top // groups), 2 if groups > 1 else 1)
    return groups * each


def _whole(value: object) -> int:
    """Return a config's value if it is a whole number; 0 for other values, such as a list."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def from_config(config: Mapping[str, Any], where: str) -> Model:
    """Build a model with few experts on torch's meta device, and scale the counts to all experts.

    Args:
        config: the Hugging Face config.
        where: the config's file, for messages.

    Raises:
        PlanError: transformers cannot build the model.
    """
    text = text_config(config)
    experts = max((_whole(text.get(key)) for key in EXPERT_COUNTS), default=0)
    few = min(fewest_experts(text), experts) if experts else 0
    weights, tied = _build_on_meta(
        _with_experts(config, few) if few < experts else dict(config), where
    )
    if few < experts:
        weights = [_repeat(weight, few, experts) for weight in weights]
    return Model(tuple(weights), text, f"{where}, built on the meta device", tied)


def _with_experts(config: Mapping[str, Any], few: int) -> dict[str, Any]:
    return {
        key: (
            few
            if key in EXPERT_COUNTS and _whole(value)
            else _with_experts(value, few)
            if isinstance(value, Mapping)
            else value
        )
        for key, value in config.items()
    }


def _repeat(weight: Weight, few: int, experts: int) -> Weight:
    """Scale a parameter's shape or count in a model of ``few`` experts up to ``experts``."""
    shape = weight.shape
    if ".experts." in weight.name and shape and shape[0] == few and "*" not in weight.name:
        return replace(weight, shape=(experts, *shape[1:]))
    if ".experts.*." in weight.name:
        return replace(weight, repeated=weight.repeated * experts // few)
    if is_router(weight.name) and shape and shape[0] == few:
        return replace(weight, shape=(experts, *shape[1:]))
    return weight


_ROUTER = re.compile(r"\.(gate|router|router\.layer|gate\.wg|router\.classifier)\.(weight|bias)$")


def is_router(name: str) -> bool:
    """Whether a parameter belongs to a router, by its name."""
    return bool(_ROUTER.search(name))


def _build_on_meta(config: dict[str, Any], where: str) -> tuple[list[Weight], bool]:
    """Return the parameters of a model on the meta device, and whether its output layer is tied."""
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise PlanError(
            f"{where}: there are no safetensors files beside it, and transformers cannot be "
            f"imported ({error}), which would build the model without weights. Install it, or "
            "name the model's size with --parameters."
        ) from error
    kind = str(config.pop("model_type", ""))
    config.pop("quantization_config", None)
    try:
        made = AutoConfig.for_model(kind, **config)
        with torch.device("meta"):
            try:
                model = AutoModelForCausalLM.from_config(made)
            except ValueError:
                model = _other_class(made)
    except Exception as error:  # transformers' code for a model may raise any error
        raise PlanError(
            f"{where}: transformers cannot build a model of model_type={kind!r} "
            f"({type(error).__name__}: {_first_line(error)}). Name a directory with safetensors "
            "files with --model, or the model's size with --parameters."
        ) from error
    counted: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, parameter in model.named_parameters():
        key = (_EXPERT.sub(".experts.*.", name), tuple(parameter.shape))
        counted[key] = counted.get(key, 0) + 1
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    tied = output is not None and output.weight is embedding.weight
    return [Weight(name, shape, number) for (name, shape), number in counted.items()], tied


def _other_class(config: Any) -> Any:
    """Build a vision-language model, for a config that has no text-only model class."""
    import transformers

    names = ("AutoModelForImageTextToText", "AutoModelForVision2Seq", "AutoModel")
    for name in names:
        kind = getattr(transformers, name, None)
        if kind is not None and type(config) in getattr(kind, "_model_mapping", {}):
            return kind.from_config(config)
    raise ValueError("no class of transformers' makes a model of it")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def of_size(text: str) -> Model:
    """Return a model of a given size, such as ``"30e9,experts=29e9"``, without names and shapes.

    Raises:
        PlanError: the text does not state a size.
    """
    first, _, rest = text.partition(",")
    key, _, value = rest.partition("=")
    if rest and key.strip() != "experts":
        raise PlanError(_bad_size(text))
    total, experts = _number(first, text), _number(value, text) if rest else 0
    if not 0 <= experts < total:
        raise PlanError(_bad_size(text))
    weights = [Weight("unknown", (total - experts,))]
    if experts:
        weights.append(Weight("experts.*.unknown", (1,), experts))
    return Model(tuple(weights), {}, f"--parameters {text}")


def _number(text: str, whole: str) -> int:
    word = text.strip().upper().replace("_", "")
    unit = {"T": 10**12, "B": 10**9, "M": 10**6, "K": 10**3}.get(word[-1:], 1)
    try:
        return round(float(word[:-1] if unit > 1 else word) * unit)
    except (ValueError, OverflowError):
        raise PlanError(_bad_size(whole)) from None


def _bad_size(text: str) -> str:
    return (
        f"--parameters {text!r}: expected N or N,experts=M, such as 7.6B or 30.5B,experts=29B, "
        "where M, the parameters of all routed experts, is a part of N."
    )
