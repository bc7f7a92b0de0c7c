"""Megatron's distributed checkpoints: what their keys mean, for the seams and for the doctor."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from precision_shim.checkpoints.layout import EXP_AVG, EXP_AVG_SQ, MASTER, OTHER, PARAMS, Part
from precision_shim.checkpoints.pickles import Made, Name
from precision_shim.checkpoints.tensors import Archive, Tensor, dtype_name
from precision_shim.checkpoints.units import Unit

DTYPES_IN_KEY = re.compile(r"dtype_\((torch\.\w+), (torch\.\w+)\)")
"""The dtypes of parameters and gradient bucket in an optimizer's key."""

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
"""Sharding types that keep a dtype for each state."""

KEYED = ("dp_reshardable", "dp_zero_gather_scatter")
"""Sharding types that name the bucket's dtype."""


def is_optimizers(key: str) -> bool:
    """Whether a key of a sharded state is an optimizer's."""
    return key.startswith("optimizer.") or ".optimizer." in key


def is_master(key: str) -> bool:
    """Whether an optimizer's key is that of a master, or of what is stored under its name."""
    return _MASTER.search(key) is not None


def read(unit: Unit, part: Part) -> None:
    """Take what a distributed checkpoint of Megatron's holds into a part."""
    for key, one in unit.tensors.items():
        if not is_optimizers(key):
            weights = "_extra_state" not in key and not key.startswith(_NO_WEIGHTS)
            part.add(PARAMS if weights else OTHER, one)
            continue
        state = _STATE.search(key)
        # A third form has ".param" at a key's end only.
        part.add(_COMPONENT[state[1]] if state else MASTER if is_master(key) else OTHER, one)
        dtypes = DTYPES_IN_KEY.search(key)
        if dtypes is not None:
            _note_dtypes(part, dtypes[1], dtypes[2])
    trees: list[Any] = []
    for archive in unit.common:
        trees.append(archive.tree)
        tree = archive.tree if isinstance(archive.tree, dict) else {}
        sharding = (tree.get("content_metadata") or {}).get("distrib_optim_sharding_type")
        if isinstance(sharding, str):
            part.facts.setdefault("sharding", sharding)
        for found in _values_of(tree.get("optimizer"), "param_state_sharding_type"):
            part.facts["sharding"] = found
    for key, make in unit.objects.items():
        if not is_optimizers(key):
            continue
        last = key.rpartition(".")[2].partition("/")[0]
        if last == "param_state":
            _take_gathered(make(), part)
        elif last in ("optimizer", "grad_scaler"):
            trees.append({last: make().tree})
    for tree in trees:
        for betas in _values_of(tree, "betas"):
            if isinstance(betas, (tuple, list)) and len(betas) == 2:
                part.facts["adam_beta2"] = float(betas[1])
        for state in _values_of(tree, "grad_scaler"):
            part.scalers.append(_scaler(state))


def _note_dtypes(part: Part, params: str, bucket: str) -> None:
    part.facts["params"] = dtype_name(params)
    part.facts["bucket"] = dtype_name(bucket)


def _take_gathered(archive: Archive, part: Part) -> None:
    """The states of all ranks in one object: ``{index: {dtypes: {state: tensor}}}``."""
    for keys, one in archive.tensors():
        for key in keys:
            if (
                isinstance(key, tuple)
                and len(key) == 2
                and all(isinstance(name, Name) for name in key)
            ):
                _note_dtypes(part, key[0].path, key[1].path)
        component = _COMPONENT.get(str(keys[-1]) if keys else "", OTHER)
        part.add(component, Tensor(f"param_state.{one.name}", one.dtype, one.elements, one.parts))


def _values_of(tree: Any, name: str) -> Iterator[Any]:
    """What stands under a key, wherever in a tree."""
    seen: set[int] = set()
    waiting = [tree]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, (dict, list, tuple, Made)) or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, dict):
            if name in one:
                yield one[name]
            waiting += one.values()
        elif isinstance(one, Made):
            waiting += [one.state, one.items, *one.arguments]
        else:
            waiting += one


def _scaler(state: Any) -> dict[str, Any]:
    """Megatron's own record of a scaler, its scale as a number where that can be read."""
    return dict(state) if isinstance(state, dict) else {"": state}
