"""Read a model's type and dtypes from its files on this machine; nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from precision_shim.errors import PlanError
from precision_shim.files.models import directory_of
from precision_shim.files.safetensors import read_header
from precision_shim.precision.agreement import CANONICAL, Engine, resolve_auto

OF_HEADER = {"F16": "fp16", "BF16": "bf16", "F32": "fp32"}
"""Maps a dtype's name in a safetensors file to its canonical name."""


def model_type(path: str) -> str:
    """The ``model_type``, such as ``"gemma2"``, of a directory or cached HF model; may be empty."""
    found = _config(path).get("model_type")
    return found if isinstance(found, str) else ""


def checkpoint_dtype(path: str) -> str:
    """Canonical name of the dtype in a model's ``config.json``; empty if unknown."""
    config = _config(path)
    for section in (config, config.get("text_config")):
        if isinstance(section, dict):
            named = section.get("dtype") or section.get("torch_dtype")
            if named is not None:
                return CANONICAL.get(str(named).removeprefix("torch."), "")
    return ""


def resolve_by_model(engine: Engine, backend: str, path: str) -> Engine:
    """Resolve an engine's dtype ``"auto"`` by its model's ``config.json``; see ``resolve_auto``."""
    return resolve_auto(engine, backend, checkpoint_dtype(path), model_type(path))


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
