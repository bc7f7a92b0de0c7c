"""The weights in a running engine, and the expected weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def load(worker: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load weights in vLLM's worker, as frameworks do; ``collective_rpc`` calls this function."""
    worker.model_runner.model.load_weights(weights)


def read(worker: Any) -> dict[str, torch.Tensor]:
    """Copy the engine's parameters; ``collective_rpc`` calls this function in vLLM's worker."""
    held = worker.model_runner.model.named_parameters()
    return {name: one.detach().clone() for name, one in held}


def as_engine_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The trainer's weights, joined like vLLM's qkv_proj and gate_up_proj."""
    named = dict(weights)
    for whole, parts in (
        ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
        ("gate_up_proj", ("gate_proj", "up_proj")),
    ):
        for name in [one for one in named if parts[0] in one]:
            joined = [named.pop(name.replace(parts[0], part)) for part in parts]
            named[name.replace(parts[0], whole)] = torch.cat(joined)
    return named


def share_on_bf16s_grid(weights: dict[str, torch.Tensor]) -> float:
    """The share of the weights that bf16 represents exactly."""
    exact = [one == one.to(torch.bfloat16).to(one.dtype) for one in weights.values()]
    return float(torch.cat([one.flatten() for one in exact]).float().mean())


def ways(held: dict[str, torch.Tensor], masters: dict[str, torch.Tensor]) -> list[str]:
    """The ways of rounding, before the engine's own dtype, that explain the bits of all weights.

    Args:
        held: the engine's weights.
        masters: the trainer's weights in fp32.
    """
    (dtype,) = {one.dtype for one in held.values()}
    half, bf16 = torch.float16, torch.bfloat16
    wires = {"once": (), "over fp16": (half,), "over bf16": (bf16,), "over both": (half, bf16)}
    found = []
    for way, dtypes in wires.items():
        wanted = masters
        for wire in (*dtypes, dtype):
            wanted = {name: one.to(wire) for name, one in wanted.items()}
        wanted = as_engine_names(wanted)
        if wanted.keys() == held.keys() and all(
            torch.equal(one, wanted[name]) for name, one in held.items()
        ):
            found.append(way)
    return found
