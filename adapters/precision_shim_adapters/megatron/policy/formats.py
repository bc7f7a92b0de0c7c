"""Read from Megatron's TransformerConfig what a model's quantized layers compute in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from precision_shim.precision import formats
from precision_shim.precision.formats import Format

_SCALINGS = {
    "delayed": (formats.DELAYED, formats.DELAYED),
    "tensorwise": (formats.TENSOR, formats.TENSOR),
    "blockwise": (formats.BLOCKS, formats.ROWS),
    "mxfp8": (formats.MX, formats.MX),
    "nvfp4": (formats.NVFP4_WEIGHTS, formats.NVFP4),
}
"""Maps a recipe to what shares a scale in the weights, and in activations and gradients."""


def read_format(
    fields: Mapping[str, Any], key: str = "{}", called: Mapping[str, str] | None = None
) -> Format | None:
    """Read the format of a model's layers; ``None`` if they are not quantized.

    Args:
        fields: the fields of Megatron's config, of which any may be missing.
        key: the config's key of a field, with ``{}`` for the field.
        called: maps fields that have another name in the config's key to this name.
    """

    def at(field: str) -> str:
        return key.format((called or {}).get(field, field))

    kind = next((kind for kind in ("fp8", "fp4") if fields.get(kind)), "")
    custom = next(
        (one for one in ("quant_recipe", "te_precision_config_file") if fields.get(one)), ""
    )
    if not kind and not custom:
        return None
    places = [f"{at(kind)}={fields[kind]}"] if kind else []
    if custom:
        places.append(f"{at(custom)}: what it changes is {formats.UNKNOWN}")
        names = ("weights", "activations", "gradients")
        return Format(
            dict.fromkeys(names, formats.Quantized(formats.UNKNOWN)), (), ", ".join(places)
        )
    default = "delayed" if kind == "fp8" else "nvfp4"
    recipe = _text(fields.get(f"{kind}_recipe") or default)
    if fields.get(f"{kind}_recipe"):
        places.append(f"{at(f'{kind}_recipe')}={recipe}")
    weights, others = _SCALINGS.get(recipe, (formats.UNKNOWN, formats.UNKNOWN))
    element = _text(fields[kind])
    low, back = ("e4m3", "e5m2") if element == "hybrid" else (element, element)
    parts = {
        "weights": formats.Quantized(low, weights),
        "activations": formats.Quantized(low, others),
        "gradients": formats.Quantized(back, others),
    }
    return Format(parts, _left_out(fields), ", ".join(places))


def _left_out(fields: Mapping[str, Any]) -> tuple[str, ...]:
    if not fields.get("first_last_layers_bf16"):
        return ()
    counts = (
        ("first", fields.get("num_layers_at_start_in_bf16", 1)),
        ("last", fields.get("num_layers_at_end_in_bf16", 1)),
    )
    return tuple(f"the {which} {count} layers" for which, count in counts if count)


def _text(value: Any) -> str:
    """The value's name: Megatron's recipes are an enum of strings."""
    return str(getattr(value, "value", value))
