"""What the quantized layers of a model compute in, beside the model's dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

UNKNOWN = "not known here"
TENSOR, DELAYED, TOKEN, CHANNEL = "per tensor", "delayed per tensor", "per token", "per channel"
BLOCKS, ROWS, MX = "blocks of 128x128", "blocks of 1x128", "mx, 1x32"
FORWARD = ("weights", "activations")
NVFP4, NVFP4_WEIGHTS = "nvfp4, 1x16", "nvfp4, 16x16"


class Quantized(NamedTuple):
    """A quantized part of a layer.

    Attributes:
        element: ``e4m3``, ``e5m2``, ``e2m1``, ``int8``, ``int4``, or ``UNKNOWN``.
        scaling: what shares a scale, or ``UNKNOWN``.
    """

    element: str
    scaling: str = UNKNOWN

    def __str__(self) -> str:
        width = {"e4m3": "fp8 ", "e5m2": "fp8 ", "e2m1": "fp4 "}.get(self.element, "")
        return f"{width}{self.element} ({self.scaling})"


@dataclass(frozen=True)
class Format:
    """How the quantized layers of a model compute.

    Attributes:
        parts: maps ``"weights"``, ``"activations"`` and ``"gradients"``, where they are quantized;
            or ``"layers"``, if the config has only a recipe's name.
        left_out: which modules keep the model's dtype, as the config names them.
        key: the config key that sets it, with its value.
    """

    parts: Mapping[str, Quantized] = field(default_factory=dict, hash=False)
    left_out: tuple[str, ...] = ()
    key: str = ""

    def __str__(self) -> str:
        names = dict[str, list[str]]()
        for part, one in self.parts.items():
            names.setdefault(str(one), []).append(part)
        text = ", ".join(f"{' and '.join(parts)} in {one}" for one, parts in names.items())
        return text + (f"; not in {', '.join(_first(self.left_out))}" if self.left_out else "")


def _first(names: tuple[str, ...]) -> tuple[str, ...]:
    return names if len(names) <= 4 else (*names[:3], f"{len(names) - 3} more")


def parts_of(weights: Quantized, activations: Quantized | None) -> dict[str, Quantized]:
    """The quantized parts of a layer that computes no gradients."""
    return {"weights": weights} | ({"activations": activations} if activations else {})


def in_e4m3(weights: str, activations: str) -> dict[str, Quantized]:
    """The parts of a layer whose weights and activations are fp8, by what shares a scale."""
    return parts_of(Quantized("e4m3", weights), Quantized("e4m3", activations))


Forward = tuple[Quantized | None, ...]
"""What of a forward pass is quantized: weights and activations."""


def forward_of(format: Format | None) -> Forward:
    """What of a forward pass is quantized: weights and activations."""
    return tuple(format.parts.get(part) if format else None for part in FORWARD)


def differences(
    mine: Format, theirs: Format, whose: tuple[str, str]
) -> tuple[list[str], list[str]]:
    """Name the parts of the forward pass in which two formats differ, and in which they may.

    Modules that are left out may differ: each config has other names for them.

    Args:
        mine: the format of one model.
        theirs: the format of the other.
        whose: the names of the two models.
    """
    differ: list[str] = []
    may: list[str] = []
    for part in dict.fromkeys((*mine.parts, *theirs.parts)):
        if part == "gradients":
            continue
        pair = [one.parts.get(part) for one in (mine, theirs)]
        fields = list(zip(*(one or (None, None) for one in pair), strict=True))
        texts = (f"{name} {one or 'not quantized'}" for name, one in zip(whose, pair, strict=True))
        if any(one != other and UNKNOWN not in (one, other) for one, other in fields):
            differ.append(f"{part}: {', '.join(texts)}")
        elif any(UNKNOWN in both for both in fields):
            may.append(f"{part}: {', '.join(texts)}")
    for name, one, other in ((whose[0], mine, theirs), (whose[1], theirs, mine)):
        alone = tuple(each for each in one.left_out if each not in other.left_out)
        if alone:
            may.append(f"left out by the {name} alone: {' and '.join(_first(alone))}")
    return differ, may


def of_section(section: Mapping[str, Any], key: str) -> Format:
    """Read the ``quantization_config`` of a checkpoint's or an engine's config.

    Understood are ``fp8``, ``mxfp8``, ``compressed-tensors``, ``awq`` and ``gptq``; of others, and
    of ``modelopt``'s other formats, only the method's name.
    """
    method = str(section.get("quant_method") or section.get("quantization") or "")
    listed = section.get("ignore") or section.get("ignored_layers")
    listed = listed or section.get("modules_to_not_convert") or ()
    left_out = tuple(map(str, listed)) if isinstance(listed, list | tuple) else ()
    return Format(_parts(section, method), left_out, f"{key}: {method or UNKNOWN}")


def _parts(section: Mapping[str, Any], method: str) -> dict[str, Quantized]:
    if method == "fp8":
        block = section.get("weight_block_size")
        static = section.get("activation_scheme") == "static"
        if not block:  # vLLM's dynamic activations are per token or per tensor, by its kernels
            return in_e4m3(TENSOR, TENSOR if static else UNKNOWN)
        rows, columns = (*block, 0, 0)[:2]
        return in_e4m3(f"blocks of {rows}x{columns}", f"blocks of 1x{columns}")
    if method in ("awq", "gptq"):
        bits = section.get("bits", section.get("w_bit", 4))
        size = section.get("group_size", section.get("q_group_size"))
        return parts_of(Quantized(f"int{bits}", f"groups of {size}"), None)
    if "mxfp8" in (method, str(section.get("quant_algo")).lower()):
        return in_e4m3(MX, MX)
    groups = section.get("config_groups")
    if method == "compressed-tensors" and isinstance(groups, Mapping) and len(groups) == 1:
        (group,) = groups.values()
        return {
            part: _compressed(group[name])
            for part, name in (("weights", "weights"), ("activations", "input_activations"))
            if group.get(name)
        }
    return parts_of(Quantized(UNKNOWN), Quantized(UNKNOWN))


_QUANTIZERS = {
    "weight_quantizer": "weights",
    "input_quantizer": "activations",
    "[kv]_bmm_quantizer": "KV cache",
}
"""Maps the ends of the names of ModelOpt's quantizers to what these quantize."""


def of_modelopt(entries: Sequence[Mapping[str, Any]], key: str) -> Format:
    """Read the list ``quant_cfg`` of ModelOpt's config, of which later entries win."""
    parts: dict[str, Quantized] = {}
    only: list[str] = []
    left_out: list[str] = []
    for entry in entries:
        name = str(entry.get("quantizer_name"))
        end = next((one for one in _QUANTIZERS if name.endswith(one)), "")
        part, modules = _QUANTIZERS.get(end, ""), name.removesuffix(end).strip("*.")
        if entry.get("enable", True):
            found = _by_modelopt(entry.get("cfg"))
            if part and modules:
                only.append(modules)
                found = found if parts.get(part, found) == found else Quantized(UNKNOWN)
            parts |= {part: found} if part else {}
        elif modules:
            left_out.append(modules)
        elif "parent_class" not in entry:
            parts = {one: parts[one] for one in parts if one != part and part}
    if only:
        left_out.insert(0, f"all but {' and '.join(dict.fromkeys(only))}")
    return Format(parts, tuple(left_out), key)


def _by_modelopt(cfg: Any) -> Quantized:
    if not isinstance(cfg, Mapping):  # several quantizers, one after the other
        return Quantized(UNKNOWN)
    bits, blocks = cfg.get("num_bits", 8), cfg.get("block_sizes") or {}
    element = f"int{bits}" if isinstance(bits, int) else str(bits)
    if isinstance(bits, list | tuple):
        element = "e{}m{}".format(*bits)
    rows, columns, scale = blocks.get(-2), blocks.get(-1), blocks.get("scale_bits")
    if not blocks:
        return Quantized(element, TENSOR if cfg.get("axis") is None else CHANNEL)
    if not columns:
        return Quantized(element, TOKEN)
    if rows:
        return Quantized(element, f"blocks of {rows}x{columns}")
    if scale is not None:
        kind = {"8": "mx", "4": "nvfp4"}.get(str(scale).strip("([e")[0], UNKNOWN)
        return Quantized(element, f"{kind}, 1x{columns}")
    floats = element.startswith("e")
    return Quantized(element, f"blocks of 1x{columns}" if floats else f"groups of {columns}")


def _compressed(scheme: Mapping[str, Any]) -> Quantized:
    bits, kind, by = scheme.get("num_bits"), scheme.get("type"), str(scheme.get("strategy"))
    element = {"float8": "e4m3", "float4": "e2m1"}.get(f"{kind}{bits}", f"{kind}{bits}")
    size = scheme.get("group_size")
    named = {"tensor": TENSOR, "channel": CHANNEL, "token": TOKEN, "tensor_group": NVFP4}
    if by == "block" and scheme.get("block_structure"):
        rows, columns = scheme["block_structure"]
        return Quantized(element, f"blocks of {rows}x{columns}")
    if by == "group":
        grouped = f"blocks of 1x{size}" if element == "e4m3" else f"groups of {size}"
        return Quantized(element, MX if size == 32 and kind == "float" else grouped)
    return Quantized(element, named.get(by, UNKNOWN))
