"""Read a model's type and dtypes from its files on this machine; nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from precision_shim.adapting import versioned
from precision_shim.errors import PlanError
from precision_shim.files.models import EXPERT_COUNTS, directory_of
from precision_shim.files.safetensors import read_header
from precision_shim.precision.agreement import AUTO, ENGINE_NAMES, Engine, Gate
from precision_shim.precision.dtypes import name_of, parse_dtype
from precision_shim.precision.formats import of_section
from precision_shim.precision.names import ALIASES

from .engines import chosen_by, gate_dtype, not_known, refusal_of_fp16

_ROUTER = "moe_router_dtype"

OF_HEADER = {"F16": "fp16", "BF16": "bf16", "F32": "fp32"}
"""Maps a dtype's name in a safetensors file to its canonical name."""


def checkpoint_dtype(path: str) -> str:
    """Canonical name of the dtype in a model's ``config.json``; empty if unknown."""
    first = next(iter(_named(_config(path)).values()), "")
    return first if first in ENGINE_NAMES else ""


def _named(config: Mapping[str, Any]) -> dict[str, str]:
    """Map the model's config, ``""``, and its part that generates to the dtype that it names."""
    found = {}
    for place in ("", "text_config"):
        section = config.get(place) if place else config
        if isinstance(section, dict):
            named = section.get("dtype") or section.get("torch_dtype")
            if named is not None:
                name = str(named).removeprefix("torch.")
                found[place] = ALIASES.get(name, name)
    return found


def quantised(path: str) -> str:
    """How the weights of a model's files are quantised, such as ``"fp8"``; empty if they are not.

    An engine quantises weights that it loads later in the same way.
    """
    section = _config(path).get("quantization_config")
    return str(section.get("quant_method") or "") if isinstance(section, dict) else ""


def resolve_by_model(engine: Engine, backend: str, path: str) -> Engine:
    """Add to an engine what its model's files decide.

    If the model's ``config.json`` is known, replaces the dtype ``"auto"`` by what the installed
    engine makes of it; without the engine, of a config that names one 16-bit dtype, by this dtype.
    """
    config = _config(path)
    kind = str(config.get("model_type") or "")
    engine = replace(engine, refuses=refusal_of_fp16(backend, kind))
    section = config.get("quantization_config")
    if engine.format is None and isinstance(section, dict):
        key = f"{path}/config.json, quantization_config"
        engine = replace(engine, format=of_section(section, key))
    if engine.computes != AUTO or not config:
        return engine
    named, stored = _named(config), stored_dtypes(path)
    says = ", ".join(f"{dtype} in {at}" if at else dtype for at, dtype in named.items())
    says = says or f"no dtype, beside files in {'+'.join(sorted(stored)) or 'no known dtype'}"
    because = f"{engine.because or f'{engine.key}=auto'}, and config.json says {says}"
    one, *others = {*named.values()} or {""}
    low = one if one in ("fp16", "bf16") and not others else ""
    found = chosen_by(backend, config, stored) or low
    if not found:
        because += f"; what {backend} makes of that is {not_known(backend)}"
        return replace(engine, because=because)
    if {found} != {*named.values()}:
        because += f", of which {versioned(backend)} makes {found}"
    return replace(engine, computes=found, because=because)


def gates_of(
    trainer: Engine | None,
    others: Iterable[Engine],
    backend: str,
    path: str,
    fields: Mapping[str, Any] | None,
    *,
    place: str,
) -> tuple[Gate, ...]:
    """Describe a model's routers in the trainer and in the first rollout of ``others``.

    None if the model's files here show no experts. ``fields`` of the trainer's model are at the key
    ``place``, with "{}" for a field's name; ``None`` if the trainer does not read them.
    """
    config = _config(path)
    inner = config.get("text_config") or config
    rollout = next((one for one in others if one.subject == "rollout"), None)
    experts = any(inner.get(name) for name in EXPERT_COUNTS)
    if trainer is None or rollout is None or not experts:
        return ()
    written, key = (fields or {}).get(_ROUTER, ""), place.format(_ROUTER)
    dtype = parse_dtype(str(written))
    computes = trainer.computes if str(written).lower() == "none" else str(written)
    mine = Gate(trainer.subject, name_of(dtype) if dtype else computes, f"{key}={written}")
    if written == "":
        because = f"{key} is not {'read' if fields is None else 'set'}"
        because += ", and the code that converts the model decides"
        mine = Gate(trainer.subject, "", because)
    found = gate_dtype(backend, config)
    because = f"{versioned(backend)}'s code for {config.get('model_type')}"
    if found == "model":
        found = rollout.computes if rollout.computes in ENGINE_NAMES else ""
    elif not found:
        because += f" is {not_known(backend)}"
    return mine, Gate(rollout.subject, found, because)


def stored_dtypes(path: str) -> frozenset[str]:
    """Canonical names of the dtypes in a model's safetensors files; empty without such files."""
    dtypes: set[str] = set()
    with suppress(PlanError, OSError, ValueError, AttributeError, KeyError, TypeError):
        for file in sorted(directory_of(path).glob("*.safetensors")):
            entries, _ = read_header(file)
            dtypes.update(entry["dtype"] for entry in entries.values())
    return frozenset(OF_HEADER[dtype] for dtype in dtypes & OF_HEADER.keys())


def _config(path: str) -> Mapping[str, Any]:
    try:
        text = (directory_of(path) / "config.json").read_text(encoding="utf-8")
        read = json.loads(text)
    except (PlanError, OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}
