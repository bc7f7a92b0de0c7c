"""A process with verl's real worker and the real vLLM, for ``test_verl.py``.

The call of verl's receiver loads verl's own stream of weights into the engine. The receiver itself
needs a GPU's memory, and before 0.9 an older vLLM.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from benchmarks import both_sides
from examples.demo.rl.vllm_on_cpu import keep_weights

import precision_shim

from ..processes.rank_server import Launch
from ..verl import sync_ranks
from . import engines

LENGTH = 32
WRAPPED = (
    "++actor_rollout_ref.actor.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap="
    "[Qwen2DecoderLayer]"
)
"""Without this override verl 0.7.1 fails on transformers 5, which this vLLM needs."""


def synced(dtype: str) -> dict[str, Any]:
    """Compare an engine's weights after a sync with the trainer's.

    Args:
        dtype: the rollout's dtype, by vLLM's name.
    """
    precision_shim.install()
    actor = sync_ranks.worker(f"actor_rollout_ref.rollout.dtype={dtype}", WRAPPED).actor.engine
    with both_sides.engine(Path(os.environ["MODEL"]), dtype, LENGTH) as llm:
        (before,) = llm.collective_rpc(engines.read)
        sync_ranks.trained(actor.module)
        masters = sync_ranks.whole(actor.module.state_dict())
        stream, _ = actor.get_per_tensor_param()
        llm.collective_rpc(engines.load, args=(stream,))
        (held,) = llm.collective_rpc(engines.read)
    return {
        "way": engines.ways(held, masters),
        "changed": all(not torch.equal(before[name], one) for name, one in held.items()),
        "dtypes": sorted({str(one.dtype) for one in held.values()}),
        "on bf16's grid": engines.share_on_bf16s_grid(held),
    }


def prepare() -> None:
    """Import verl and vLLM in the server."""
    sync_ranks.prepare()
    both_sides.load_vllm()
    keep_weights()


def run(launch: Launch) -> dict[str, Any]:
    """Run a rank from its start to its end."""
    launch.join()
    return {name: synced(**options) for name, options in launch.options.items()}
