"""Convert dtypes in a user's config to the names that engines accept; write a config's keys."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

from precision_shim.precision.agreement import AUTO, ENGINE_NAMES, FP8, Engine
from precision_shim.precision.dtypes import name_of, parse_dtype, pick_name


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


def with_rounded(engine: Engine, options: Mapping[str, Any], place: str) -> Engine:
    """Add to an engine what its ``options``, at the key ``place``, keep in fewer bits.

    An engine with fp8 weights gets the dtype ``FP8``.
    """
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
