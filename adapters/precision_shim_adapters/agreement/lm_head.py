"""Compute the LM head in fp32 in the trainer and in the rollout engine, or in neither.

For ``PRECISION_SHIM_HEAD=fp32``, the adapter describes in the driver each engine's LM head as a
``Head``; ``report_heads`` writes the keys, for the trainer ``head_dtype`` (vLLM's name) in the
overrides of the HF config. There ``compute_in_fp32`` then changes torch's ``Linear``.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from precision_shim.adapting import current_settings, decide, look, version_of, warn
from precision_shim.errors import UnsupportedPrecisionError
from precision_shim.precision.findings import Problem
from precision_shim.precision.lm_head import HEAD_MARK, Head, refused
from precision_shim.process.settings import Settings

from .names import key_of
from .report import FEATURE

SETTING = "PRECISION_SHIM_HEAD=fp32"
SUBJECT = "LM head"
FIELD = "head_dtype"
"""vLLM's name for the LM head's dtype in a model's HF config."""

NOT_IN_FORCE = "the shim's seams on its model are not in force; precision-shim doctor says why"

IsInForce = Callable[[str, str], bool]
"""Function that returns whether a feature, with a group of seams, is in force in the workers."""

Read = Callable[[], Sequence[Head]]
"""A function that describes the LM head of each engine of a job."""


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


def unchanged_heads(subject: str, framework: str) -> Read:
    """A function that reads the LM head of a trained model, which the shim does not change."""
    refusal = f"the shim does not change the LM heads of {framework}"
    return lambda: [Head(subject, SETTING, refusal=refusal)]


def names_head(*targets: str | Iterable[str] | None) -> bool:
    """Whether LoRA's target modules (names or a regular expression) include the LM head."""
    words: list[str] = []
    for several in targets:
        words += [several] if isinstance(several, str) else map(str, several or ())
    return any(name in word for word in words for name in ("lm_head", "output_layer"))


def report_heads(where: str, read: Read, write: Callable[[str, str | bool], object] | None) -> None:
    """Write the keys that make all LM heads compute in fp32, or report why none of them does.

    If the user asked for no dtype of the LM heads, report whether only some compute in fp32.

    Args:
        where: framework and version, such as ``"verl 0.9.1"``.
        read: describes the LM heads.
        write: sets a config key; ``None`` if the framework has already copied the config.

    Raises:
        UnsupportedPrecisionError: in strict mode, an engine cannot compute its LM head in fp32.
    """
    settings = current_settings()
    heads, framework = read(), where.split(" ", 1)[0]
    if settings["head"] != "fp32":
        for choice in _one_sided(heads):
            decide(framework, SUBJECT, FEATURE, *choice)
        return
    stay = refused(heads, may_write=write is not None)
    decide(framework, SUBJECT, FEATURE, *_choice(heads, stay))
    if stay:
        message = ". ".join(_message(where, heads, stay))
        if settings.strict:
            raise UnsupportedPrecisionError(message)
        warn(message)
        return
    for head in heads:
        if not head.in_fp32 and write is not None:
            write(head.key, head.value)


def problems_of_heads(
    where: str, read: Read, settings: Settings, *, on: bool
) -> tuple[list[Problem], list[str]]:
    """Predict what ``report_heads`` reports; ``on``: whether ``rollout-agreement`` is in force."""
    if not on:
        return [], []
    heads, said = read(), f"{SUBJECT}: {FEATURE}: {{}} ({{}})"
    if settings["head"] != "fp32":
        return [], [said.format(*choice) for choice in _one_sided(heads)]
    stay = refused(heads, may_write=True)
    notes = [said.format(*_choice(heads, stay))]
    sure = [head for head in stay if head.known]
    if not sure:
        return [], notes
    return [Problem("lm-head", SUBJECT, sure[0].key, *_message(where, heads, sure))], notes


def _one_sided(heads: Sequence[Head]) -> Iterable[tuple[str, str]]:
    wide = {head.subject: head.key for head in heads if head.in_fp32 and not head.refusal}
    others = dict.fromkeys(head.subject for head in heads if head.subject not in wide)
    if wide and others:
        because = f"{', '.join(wide.values())}; {SETTING} takes effect in all engines or in none"
        chosen = f"fp32 in {' and '.join(wide)}, the model's dtype in {' and '.join(others)}"
        yield chosen, because


def _choice(heads: Sequence[Head], stay: Sequence[Head]) -> tuple[str, str]:
    if stay:
        return "each engine's own dtype", f"{SETTING} is refused: {_reasons(stay)}"
    keys = ", ".join(dict.fromkeys(head.key for head in heads if head.key))
    return "fp32 in trainer and rollout", f"{SETTING}; {keys}"


def _message(where: str, heads: Sequence[Head], stay: Sequence[Head]) -> tuple[str, str]:
    """The two parts of the message about the refusal of ``stay``: the reason and the remedy."""
    remedies = {
        head.remedy or ("" if head.refusal else f"Write {head.key}={head.value}") for head in stay
    }
    ways = ". ".join(sorted(remedies - {""}))
    message = (
        f"{where}: {SETTING} is refused, because it takes effect in all engines or in none: "
        f"{_reasons(stay)}. The shim changes no LM head"
    )
    theirs = ", ".join(dict.fromkeys(head.key for head in heads if head.in_fp32 and head.key))
    if theirs:
        message += f", but {theirs} in the config takes effect"
    unset = f"{ways}. Or unset" if ways else "Unset"
    return message, f"{unset} PRECISION_SHIM_HEAD."


def _reasons(stay: Sequence[Head]) -> str:
    return "; ".join(
        f"{head.subject}: "
        + (head.refusal or f"{head.key} is not set, and the config is copied already")
        for head in stay
    )


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
        # The shim must not replace a subclass's own ``forward``, such as a quantised layer's.
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
