"""Small checkpoints of each kind, written by torch."""

from __future__ import annotations

import json
import re
import struct
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner

from precision_shim.scaling import LossScaler, ScalerSettings, record_of, to_tensor

ELEMENTS = 6 * 4


def state(moments: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A model's weights and its optimizer's states, under the keys that torch makes."""
    torch.manual_seed(0)
    values = torch.randn(6, 4)
    return {
        "model.weight": values.bfloat16(),
        "optimizer.state.weight.exp_avg": (values / 3).to(moments).float(),
        "optimizer.state.weight.exp_avg_sq": values.square(),
        "optimizer.state.weight.step": torch.tensor(3.0),
    }


def scaler() -> LossScaler:
    return LossScaler(ScalerSettings(init_scale=1024.0), device="cpu")


def distributed(folder: Path, **more: object) -> Path:
    """A distributed checkpoint of torch's, as torchtitan writes it."""
    return _saved(folder, {**state(), **more})


def _saved(folder: Path, kept: dict[str, object]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no process group
        dcp.save(kept, checkpoint_id=folder)
    return folder


COMMON = {
    "content_metadata": {"distrib_optim_sharding_type": "fully_reshardable"},
    "optimizer": {
        "grad_scaler": {
            "scale": torch.tensor([512.0]),
            "growth_tracker": 3,
            "hysteresis_tracker": 2,
        }
    },
}
"""Part of the common state that Megatron saves beside the tensors."""


def megatrons(folder: Path, *, within: bool = False, **more: object) -> Path:
    """A distributed checkpoint with Megatron's additions.

    Args:
        folder: where it is written.
        within: whether the common state is an object like any other, as in megatron-core 0.19.
        more: further entries.
    """
    kept = {
        re.sub(r"(state)\.(\w+)\.(\w+)$", r"\1.\3.\2", key): value for key, value in state().items()
    }
    kept |= more
    if within:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no process group
            whole = DefaultSavePlanner(flatten_state_dict=False)
            kept["common_state/shard_0_1"] = [COMMON]
            dcp.save(kept, checkpoint_id=folder, planner=whole)
    else:
        _saved(folder, kept)
        torch.save(COMMON, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return folder


def of_ranks(folder: Path, ranks: int = 2) -> Path:
    """The checkpoint files of each rank, as verl's and SkyRL's FSDP workers write them."""
    folder.mkdir(parents=True)
    values = torch.randn(3, 4)
    for rank in range(ranks):
        end = f"world_size_{ranks}_rank_{rank}.pt"
        torch.save({"weight": values}, folder / f"model_{end}")
        moments = {"step": torch.tensor(3.0), "exp_avg": values, "exp_avg_sq": values.square()}
        torch.save({"state": {0: moments}, "param_groups": []}, folder / f"optim_{end}")
        client = {"client_state": {"precision_shim_scaler": record_of(scaler())}}
        torch.save({"lr_scheduler": {}, **client}, folder / f"extra_state_{end}")
    return folder


def safetensors(folder: Path) -> Path:
    """Weights only, in the format of Hugging Face."""
    folder.mkdir(parents=True)
    header = {
        "__metadata__": {"format": "pt"},
        "weight": {"dtype": "BF16", "shape": [6, 4], "data_offsets": [0, 48]},
        "norm": {"dtype": "F32", "shape": [4], "data_offsets": [48, 64]},
    }
    text = json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text + bytes(64)
    (folder / "model.safetensors").write_bytes(content)
    return folder


def with_record(folder: Path) -> Path:
    """A distributed checkpoint that contains a loss scaler's record, as torchtitan's does."""
    record = to_tensor(record_of(scaler()))
    return distributed(folder, **{"train_state.precision_shim_scaler": record})


KINDS = {"dcp": distributed, "megatron": megatrons, "shards": of_ranks, "safetensors": safetensors}
