"""Convert dtypes in a user's config to the names that engines accept; write a config's keys."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

from precision_shim.precision import formats
from precision_shim.precision.agreement import AUTO, ENGINE_NAMES, FP8, Engine
from precision_shim.precision.dtypes import name_of, parse_dtype, pick_name
from precision_shim.precision.formats import Format

_ONLINE = {
    "fp8_per_block": (formats.BLOCKS, formats.ROWS),
    # The kernels choose whether dynamic activations are scaled per token or per tensor.
    "fp8_per_tensor": (formats.TENSOR, formats.UNKNOWN),
    "fp8_per_channel": (formats.CHANNEL, formats.TOKEN),
    "mxfp8": (formats.MX, formats.MX),
}
"""Maps vLLM's names of fp8 that it quantizes itself to what shares a scale on both sides."""


def engine_name(value: object, key: str, where: str, also: Sequence[str] = ("auto",)) -> str:
    """Convert the dtype that a user wrote to the name that a rollout engine accepts.

    Args:
        value: the config's value, which is a dtype or a dtype name in any known spelling.
        key: the config's key.
        where: framework and version, for the error message.
        also: words that the key accepts besides dtype names; they are returned unchanged.

    Returns:
        ``"float16"``, ``"bfloat16"``, ``"float32"``, or a word of ``also``.

    Raises:
        DtypeError: the value is no dtype name.
    """
    if str(value).strip().lower() in also:
        return str(value).strip().lower()
    return ENGINE_NAMES[pick_name(value, ENGINE_NAMES, key=key, where=where, also=also)]


def key_of(place: str, name: str) -> str:
    """The key of an engine's option: in a section of a config, or by the prefix of its flags."""
    return f"{place}-{name.replace('_', '-')}" if place.startswith("--") else f"{place}.{name}"


def with_rounded(
    engine: Engine, options: Mapping[str, Any], place: str, backend: str = "vllm"
) -> Engine:
    """Add to an engine what its ``options``, at the key ``place``, keep in fewer bits.

    An engine with fp8 weights gets the dtype ``FP8``, and each with quantized layers its format.
    """
    if engine.format is None:  # a checkpoint's section says more
        engine = replace(engine, format=read_format(options, place, backend))
    found = [engine.rounded] if engine.rounded[0] else []
    in_fp8: dict[str, Any] = {}
    kinds = {"quantization": "weights", "torchao_config": "weights", "kv_cache_dtype": "KV cache"}
    for name, what in kinds.items():
        value = options.get(name)
        dtype, key = parse_dtype(str(value)), key_of(place, name)
        wide = {"fp32", engine.computes} - {FP8} if name == "kv_cache_dtype" else ()
        if value in (None, "", AUTO) or (dtype is not None and name_of(dtype) in wide):
            continue
        if name == "quantization" and FP8 in str(value):
            in_fp8 = {"computes": FP8, "key": key, "because": f"{key}={value}"}
        else:
            found.append((f"{value} {what}", f"{key}={value}"))
    engine = replace(engine, **in_fp8)
    if not found:
        return engine
    whats, keys = zip(*found, strict=True)
    return replace(engine, rounded=(" and ".join(whats), ", ".join(keys)))


def read_format(options: Mapping[str, Any], place: str, backend: str = "vllm") -> Format | None:
    """What an engine's options, at the key ``place``, say of its quantized layers; else ``None``.

    vLLM's ``quantization_config`` and ``hf_overrides.quantization_config`` win over its
    ``quantization``. SGLang's ``torchao_config`` is known by its name only.
    """
    overrides = options.get("hf_overrides")
    section = overrides.get("quantization_config") if isinstance(overrides, Mapping) else None
    if isinstance(section, Mapping):
        return formats.of_section(section, key_of(place, "hf_overrides.quantization_config"))
    written = options.get("quantization_config")
    own: Mapping[str, Any] = written if isinstance(written, Mapping) else {}
    for kind in ("linear", "moe"):
        if (asked := own.get(kind)) is not None:
            inner = asked.get("weight") if isinstance(asked, Mapping) else asked
            key = key_of(place, f"quantization_config.{kind}")
            left_out = tuple(map(str, own.get("ignore") or ()))
            return Format(_online(str(inner)), left_out, f"{key}={inner}")
    for name in ("quantization", "torchao_config"):
        if (value := options.get(name)) not in (None, "", AUTO):
            return Format(_online(str(value), backend), (), f"{key_of(place, name)}={value}")
    return None


def _online(name: str, backend: str = "vllm") -> dict[str, formats.Quantized]:
    found = _ONLINE.get(name.removesuffix("_static").removesuffix("_dynamic"))
    if found is not None:
        return formats.in_e4m3(*found)
    if name == FP8:  # SGLang's weights are per channel or per tensor, by its kernels
        return formats.in_e4m3(
            formats.TENSOR if backend == "vllm" else formats.UNKNOWN, formats.UNKNOWN
        )
    return formats.parts_of(formats.Quantized(formats.UNKNOWN), formats.Quantized(formats.UNKNOWN))


def write_key(config: Any, key: str, value: object) -> None:
    """Set a dotted key in a config of mappings and objects; ``None`` becomes a mapping."""
    name, _, rest = key.partition(".")
    in_mapping = isinstance(config, MutableMapping)
    if rest:
        section = config.get(name) if in_mapping else getattr(config, name)
        if section is None:
            write_key(config, name, {})
            section = config[name] if in_mapping else getattr(config, name)
        write_key(section, rest, value)
    elif in_mapping:
        config[name] = value
    else:
        setattr(config, name, value)
