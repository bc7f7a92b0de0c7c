"""Interpret the keys of Megatron's distributed checkpoints, for seams and the CLI."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Any

from precision_shim.checkpoints.layout import EXP_AVG, EXP_AVG_SQ, MASTER, OTHER, PARAMS, Part
from precision_shim.checkpoints.pickles import Name, dicts_in
from precision_shim.checkpoints.tensors import Archive, Tensor, dtype_name
from precision_shim.checkpoints.units import Unit

DTYPES_IN_KEY = re.compile(r"dtype_\((torch\.\w+), (torch\.\w+)\)")
"""Matches the dtypes in an optimizer's key: the parameters' dtype, then the bucket's dtype."""

_MASTER = re.compile(r"\.param$|\.fp32_param\.")
_STATE = re.compile(r"(?:^|\.)(?:state\.|bucket_idx_\d+\.)(param|fp32_param|exp_avg_sq|exp_avg)\b")
_COMPONENT = {
    "param": MASTER,
    "fp32_param": MASTER,
    "exp_avg": EXP_AVG,
    "exp_avg_sq": EXP_AVG_SQ,
}
_NO_WEIGHTS = ("rng_state", "rerun_state", "opt_param_scheduler", "iteration")

KEEPING = ("dp_reshardable", "fully_sharded_model_space")
"""Sharding types of checkpoints that store each optimizer state in its own dtype."""

KEYED = ("dp_reshardable", "dp_zero_gather_scatter")
"""Sharding types of checkpoints whose keys contain the bucket's dtype."""


OFFLOADED = "offload_fraction"
"""Key of the fraction of states on the host, which only param groups of Megatron's optimizer for
CPU offload have. From groups with this key ``fill_part`` derives ``counted`` (whether all of these
groups have a step count) and ``names_classes`` (whether a ``common.pt`` has such groups; torch
refuses to load the classes that its pickle names)."""


def is_optimizers(key: str) -> bool:
    """Whether a key of a sharded state belongs to an optimizer."""
    return key.startswith("optimizer.") or ".optimizer." in key


def is_master(key: str) -> bool:
    """Whether an optimizer's key names master weights or their remainders, which share a key."""
    return _MASTER.search(key) is not None


def fill_part(unit: Unit, part: Part) -> None:
    """Add the tensors and settings of a Megatron distributed checkpoint to a ``Part``."""
    for key, tensor in unit.tensors.items():
        part.add(_component_of(key), tensor)
        dtypes = DTYPES_IN_KEY.search(key) if is_optimizers(key) else None
        if dtypes is not None:
            _note_dtypes(part, dtypes[1], dtypes[2])
    for archive in unit.common:
        _take_common(_common_of(archive.tree), part)
    archives = list(unit.common)
    for key, make in unit.objects.items():
        last = key.rpartition(".")[2].partition("/")[0]
        if is_optimizers(key) and last == "param_state":
            _take_gathered(make(), part)
        elif is_optimizers(key) and last in ("optimizer", "grad_scaler"):
            archives.append(make())
    for place, archive in enumerate(archives):
        for betas in _values_of(archive.tree, "betas"):
            if isinstance(betas, (tuple, list)) and len(betas) == 2:
                part.facts["adam_beta2"] = float(betas[1])
        for group in _dicts_with(archive.tree, OFFLOADED):
            part.facts[OFFLOADED] = float(group[OFFLOADED])
            part.facts["counted"] = part.facts.get("counted", True) and "step" in group
            if place < len(unit.common) and isinstance(archive.tree, dict):
                part.facts["names_classes"] = True
        for state in _dicts_with(archive.tree, "growth_tracker"):
            part.scalers.append({**state, "scale": _number(archive, state.get("scale"))})


def _component_of(key: str) -> str:
    if not is_optimizers(key):
        weights = "_extra_state" not in key and not key.startswith(_NO_WEIGHTS)
        return PARAMS if weights else OTHER
    match = _STATE.search(key)
    if match is not None:
        return _COMPONENT[match[1]]
    return MASTER if is_master(key) else OTHER  # keys of one sharding type end in ".param"


def _common_of(tree: Any) -> dict[Any, Any]:
    """The common state's dict, which Megatron may have stored as the only element of a list."""
    if isinstance(tree, list) and len(tree) == 1:
        (tree,) = tree
    return tree if isinstance(tree, dict) else {}


def _take_common(tree: dict[Any, Any], part: Part) -> None:
    sharding = (tree.get("content_metadata") or {}).get("distrib_optim_sharding_type")
    if isinstance(sharding, str):
        part.facts.setdefault("sharding", sharding)
    for value in _values_of(tree.get("optimizer"), "param_state_sharding_type"):
        if isinstance(value, str):
            part.facts["sharding"] = value


def _note_dtypes(part: Part, params: str, bucket: str) -> None:
    part.facts["params"] = dtype_name(params)
    part.facts["bucket"] = dtype_name(bucket)


def _take_gathered(archive: Archive, part: Part) -> None:
    """Add all ranks' states from one object of the form ``{index: {dtypes: {state: tensor}}}``."""
    for keys, tensor in archive.tensors():
        for key in keys:
            if (
                isinstance(key, tuple)
                and len(key) == 2
                and all(isinstance(name, Name) for name in key)
            ):
                _note_dtypes(part, key[0].path, key[1].path)
        component = _COMPONENT.get(str(keys[-1]) if keys else "", OTHER)
        part.add(
            component,
            Tensor(f"param_state.{tensor.name}", tensor.dtype, tensor.elements, tensor.parts),
        )


def _dicts_with(tree: Any, name: str) -> Iterator[dict[Any, Any]]:
    return (mapping for mapping in dicts_in(tree) if name in mapping)


def _values_of(tree: Any, name: str) -> Iterator[Any]:
    return (mapping[name] for mapping in _dicts_with(tree, name))


def _number(archive: Archive, value: Any) -> float | None:
    """Return a number, or the value of an fp32 tensor of one element; ``None`` for other values."""
    if isinstance(value, (int, float)):
        return float(value)
    for _, tensor in archive.tensors([value]):
        content = tensor.parts[0](4) if tensor.parts and tensor.dtype == "fp32" else b""
        if len(content) == 4:
            number: float = struct.unpack("<f", content)[0]
            return number
    return None
