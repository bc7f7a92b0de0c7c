"""Read Megatron's distributed checkpoints for ``precision-shim checkpoint``.

If param groups have the key ``OFFLOADED``, the fact ``counted`` is whether all have a step count.
``names_classes``: a ``common.pt`` has such groups, and torch refuses to load the pickled classes.
``stepped``: a ``dp_reshardable`` checkpoint has the parameters' copies that CPU offload updates.
"""

from __future__ import annotations

import re
import struct
from typing import Any

from precision_shim.files.metadata import dtype_name
from precision_shim.files.pickles import dicts_in
from precision_shim_adapters.common import megatron_keys

from .layout import MOMENTS, CheckpointPart
from .tensors import Archive
from .units import Unit

_STATE = re.compile(r"(?:^|\.)(?:state\.|bucket_idx_\d+\.)(param|fp32_param|exp_avg_sq|exp_avg)\b")
_COMPONENT = {"param": "master", "fp32_param": "master", **{name: name for name in MOMENTS}}
_NO_WEIGHTS = ("rng_state", "rerun_state", "opt_param_scheduler", "iteration")


def fill_part(unit: Unit, part: CheckpointPart) -> None:
    """Add the tensors and settings of a Megatron distributed checkpoint to a ``CheckpointPart``."""
    for key, tensor in unit.tensors.items():
        part.add(_component_of(key), tensor)
        if key.endswith(".master_param"):
            part.facts["stepped"] = True
        dtypes = (
            megatron_keys.DTYPES_IN_KEY.search(key) if megatron_keys.is_optimizers(key) else None
        )
        if dtypes is not None:
            _note_dtypes(part, *dtypes.groups())
    for archive in unit.common:
        if sharding := _sharding_of(archive.tree):
            part.facts["sharding"] = sharding
        _take_settings(archive, part, common=True)
    for key, make in unit.objects.items():
        last = key.rpartition(".")[2].partition("/")[0]
        if megatron_keys.is_optimizers(key) and last == "param_state":
            _take_gathered(make(), part)
        elif megatron_keys.is_optimizers(key) and last in ("optimizer", "grad_scaler"):
            _take_settings(make(), part, common=False)


def _component_of(key: str) -> str:
    if not megatron_keys.is_optimizers(key):
        weights = "_extra_state" not in key and not key.startswith(_NO_WEIGHTS)
        return "params" if weights else "other"
    match = _STATE.search(key)
    if match is not None:
        return _COMPONENT[match[1]]
    # Keys of one sharding type end in ".param".
    return "master" if megatron_keys.is_master(key) else "other"


def _sharding_of(tree: Any) -> str | None:
    """Return the optimizer's sharding type, or else that of the checkpoint's metadata."""
    for name in ("param_state_sharding_type", "distrib_optim_sharding_type"):
        for found in dicts_in(tree):
            if isinstance(sharding := found.get(name), str):
                return sharding
    return None


def _take_settings(archive: Archive, part: CheckpointPart, *, common: bool) -> None:
    """Add the settings in the common state, or in another object of the optimizer."""
    for found in dicts_in(archive.tree):
        if isinstance(groups := found.get("param_groups"), list):
            part.groups.append([group for group in groups if isinstance(group, dict)])
        if isinstance(found.get("betas"), (tuple, list)):
            part.facts["adam_beta2"] = float(found["betas"][1])
        if megatron_keys.OFFLOADED in found:
            part.facts[megatron_keys.OFFLOADED] = float(found[megatron_keys.OFFLOADED])
            part.facts["counted"] = part.facts.get("counted", True) and "step" in found
            if common and isinstance(archive.tree, dict):
                part.facts["names_classes"] = True
        if "growth_tracker" in found:
            part.scalers.append({**found, "scale": _number(archive, found.get("scale"))})


def _note_dtypes(part: CheckpointPart, params: str, bucket: str) -> None:
    part.facts.setdefault("owned", set()).add(dtype_name(params))
    if part.facts.get("params") in (None, "fp32"):  # some parameters of a 16-bit model may be fp32
        part.facts["params"] = dtype_name(params)
        part.facts["bucket"] = dtype_name(bucket)


def _take_gathered(archive: Archive, part: CheckpointPart) -> None:
    """Add all ranks' states from one object of the form ``{index: {dtypes: {state: tensor}}}``."""
    for keys, tensor in archive.tensors():
        for key in keys:
            if isinstance(key, tuple):
                _note_dtypes(part, *(dtype.kind for dtype in key))
        part.add(component := _COMPONENT.get(str(keys[-1]), "other"), tensor)
        if component == "other":
            part.unknown[f"the optimizer state {keys[-1]}"] = True


def _number(archive: Archive, value: Any) -> float | None:
    """Return a number, or the value of an fp32 tensor of one element; ``None`` for other values."""
    for _, tensor in archive.tensors([value]):
        if (tensor.dtype, tensor.elements) == ("fp32", 1):
            [value] = struct.unpack("<f", tensor.parts[0](4))
    return float(value) if isinstance(value, (int, float)) else None
