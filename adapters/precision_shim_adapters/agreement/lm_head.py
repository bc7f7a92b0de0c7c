"""Compute the LM head in fp32 in the trainer and in the rollout engine, or in neither.

For ``PRECISION_SHIM_HEAD=fp32``, the adapter describes in the driver each engine's LM head as a
``Head``; ``report_sides`` writes the keys, for the trainer ``head_dtype`` (vLLM's name) in the
overrides of the HF config. There ``compute_in_fp32`` then changes torch's ``Linear``.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.nn import functional

from precision_shim.adapting import look, version_of
from precision_shim.errors import UnsupportedPrecisionError
from precision_shim.precision.agreement import ENGINE_NAMES
from precision_shim.precision.lm_head import HEAD_MARK, SETTING, Head

from .names import key_of

FIELD = "head_dtype"
"""vLLM's name for the LM head's dtype in a model's HF config."""

NOT_IN_FORCE = "the shim's seams on its model are not in force; precision-shim doctor says why"

_MEGATRONS_MODEL = "megatron.core.models.gpt.gpt_model:GPTModel.__init__"

IsInForce = Callable[[str, str], bool]
"""Function that returns whether a feature, with a group of seams, is in force in the workers."""

_OPTIONS: dict[str, tuple[str, str | bool, str]] = {
    "vllm": (FIELD, "float32", "Install vLLM 0.26 or later"),
    "sglang": ("enable_fp32_lm_head", True, "Install a newer SGLang, such as 0.5.12"),
}
"""A rollout engine's option for an LM head in fp32, and how to install a release with it."""

_PLACES = {
    "vllm": "vllm.model_executor.layers.logits_processor:LogitsProcessor",
    "sglang": "sglang.srt.layers.logits_processor:LogitsProcessor",
}
"""The class that reads the option; the class of older releases does not mention the option."""


def of_rollout(backend: str, options: Mapping[str, Any], place: str, quantised: str = "") -> Head:
    """Describe the LM head of a rollout engine, ``"vllm"`` or ``"sglang"``.

    ``options`` go to the engine; ``place`` is their config key or their flags' prefix.
    ``quantised`` is the key of a quantisation whose ``hf_overrides`` the shim would overwrite.
    """
    if backend not in _OPTIONS:
        return Head("rollout", refusal=f"the shim does not set the LM head of {backend}")
    option, value, newer = _OPTIONS[backend]
    inner = f"{place}.hf_overrides" if backend == "vllm" else place
    key = key_of(inner, option)
    section = options.get("hf_overrides") if backend == "vllm" else options
    if section is not None and not isinstance(section, Mapping):
        return Head("rollout", key, refusal=f"{inner}={section!r} is no mapping")
    written = (section or {}).get(option)
    in_fp32 = written is True or _is_float32(written)
    if written is not None and not in_fp32:
        return Head("rollout", key, refusal=f"{key}={written}", remedy=f"Leave {key} out")
    if quantised and backend == "vllm" and not in_fp32:
        refusal = f"{quantised} makes hf_overrides of its own, which {key} would replace"
        remedy = f"Write {inner} whole, with {option}: float32"
        return Head("rollout", key, refusal=refusal, remedy=remedy)
    refusal, known = _lacks(backend, option)
    remedy = newer if refusal else ""
    return Head("rollout", key, in_fp32, refusal, remedy, value, known)


def _is_float32(written: object) -> bool:
    return str(written).removeprefix("torch.") == "float32"


def _lacks(backend: str, option: str) -> tuple[str, bool]:
    """Return why an engine ignores its option, or ``""``, and whether the engine is installed."""
    symbol = look(_PLACES[backend])
    if option in symbol.names:
        return "", True
    ignores = f"{backend} {version_of(backend, (backend,)) or ''}".rstrip()
    if symbol.found:
        return f"{ignores} does not use {option} for its LM head", True
    problem = symbol.problem or f"{symbol.target} not found"
    return f"{problem}, so whether {ignores} uses {option} is not known", symbol.module_found


def of_trainer(subject: str, overrides: object, place: str, refusal: str = "") -> Head:
    """Describe the LM head of a trained model or of a reference model.

    ``overrides`` of the HF config have the key ``place``. ``refusal``: why the model cannot compute
    its LM head in fp32, with the key to change.
    """
    key = f"{place}.{FIELD}"
    value = overrides.get(FIELD) if isinstance(overrides, Mapping) else None
    in_fp32 = _is_float32(value)
    if refusal:
        return Head(subject, key, refusal=refusal)
    if value is not None and not in_fp32:
        return Head(subject, key, refusal=f"{key}={value}", remedy=f"Leave {key} out")
    return Head(subject, key, in_fp32)


def unchanged_heads(
    subject: str, framework: str, rollout: Iterable[Head] = (), own: Head | None = None
) -> list[Head]:
    """Describe the LM heads of a job of a framework whose trained LM head the shim leaves.

    ``rollout`` are the engines' LM heads, and ``own`` is the trained model's if the framework has a
    key for it.
    """
    if own is not None and own.in_fp32:
        return [own, *rollout]
    refusal = f"the shim does not change the LM heads of {framework}"
    head = own if own is not None and own.refusal else Head(subject, SETTING, refusal=refusal)
    return [head, *(one for one in rollout if one.in_fp32)]


def of_automodel(
    subject: str, options: Mapping[str, Any], place: str, experts: object
) -> Head | None:
    """Describe an LM head to which Automodel gives a dtype; ``None`` if the user wrote no fp32.

    ``options`` go to Automodel's parallelizer of experts, which only runs if ``experts``, the size
    of the groups of expert parallelism, is above 1.
    """
    written, key = options.get("lm_head_precision"), f"{place}.lm_head_precision"
    if not _is_float32(written):
        return None
    if int(str(experts or 1)) < 2:
        refusal = f"{key}={written} takes effect with expert parallelism only"
        return Head(subject, key, True, refusal)
    if options.get("wrap_outer_model", True):
        refusal = f"{key}={written}: Automodel then rounds the logits to the model's dtype"
        return Head(subject, key, True, refusal, f"Write {place}.wrap_outer_model=False")
    return Head(subject, key, in_fp32=True)


def by_megatron(subject: str, fields: Mapping[str, Any], key: str) -> Head | None:
    """Describe an LM head whose logits Megatron itself makes fp32; ``None`` if it does not.

    ``key`` is the config's key of the field ``logit_dtype``, which the newest Megatron has.
    """
    asked = _is_float32(ENGINE_NAMES.get(str(fields.get("logit_dtype")), fields.get("logit_dtype")))
    has = asked and "logit_dtype" in look(_MEGATRONS_MODEL).parameters
    return Head(subject, key, in_fp32=True) if has else None


def names_head(*targets: str | Iterable[str] | None) -> bool:
    """Whether LoRA's target modules (names or a regular expression) include the LM head."""
    words: list[str] = []
    for several in targets:
        words += [several] if isinstance(several, str) else map(str, several or ())
    return any(name in word for word in words for name in ("lm_head", "output_layer"))


def is_marked(overrides: object) -> bool:
    """Whether the overrides of a model's HF config ask for an LM head in fp32."""
    return isinstance(overrides, Mapping) and _is_float32(overrides.get(FIELD))


def compute_in_fp32(model: torch.nn.Module, where: str) -> None:
    """Make a Hugging Face model compute its LM head in fp32, as vLLM and SGLang compute theirs.

    Input and weight are rounded to the model's compute dtype; the product and the logits are fp32.
    ``where`` is framework and version.

    Raises:
        UnsupportedPrecisionError: the LM head is no plain linear layer.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    if getattr(type(head), "forward", None) is not torch.nn.Linear.forward:
        # The shim must not replace a subclass's ``forward``, such as a quantised layer's.
        raise UnsupportedPrecisionError(
            f"{where}: {SETTING}: the LM head of {type(model).__name__} is a "
            f"{type(head).__name__}, and the shim computes only a torch.nn.Linear in fp32. Unset "
            "PRECISION_SHIM_HEAD."
        )
    head.forward = types.MethodType(_forward, head)
    setattr(head, HEAD_MARK, "fp32")


def _forward(head: torch.nn.Linear, input: torch.Tensor) -> torch.Tensor:
    kind = input.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    given = [input, head.weight] if head.bias is None else [input, head.weight, head.bias]
    # Under autocast the weights may be fp32, so round them like the rollout's copy.
    wide = [(tensor if dtype is None else tensor.to(dtype)).float() for tensor in given]
    with torch.autocast(kind, enabled=False):
        return functional.linear(*wide)
