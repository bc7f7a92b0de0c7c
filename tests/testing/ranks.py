"""What the ranks of ``test_megatron_cpu.py`` run; ``processes/rank_server.py`` starts the ranks."""

from __future__ import annotations

from typing import Any

import torch

from precision_shim_tools.testing import (
    measure_bytes,
    megatron_on_cpu,
    model_parallel,
    stand_in_transformer_engine,
)

from ..processes.rank_server import Launch
from . import tiny_training as tiny


def prepare() -> None:
    """Import megatron-core, in the server."""
    import megatron.core.models.gpt
    import megatron.core.optimizer  # noqa: F401


def run(launch: Launch) -> dict[str, Any]:
    """Run a rank, which trains each of the modes twice."""
    torch.set_num_threads(1)
    world, rank = launch.world, launch.rank
    report = {}
    with (
        stand_in_transformer_engine(),
        megatron_on_cpu(),
        model_parallel(world, rank, launch.store),
    ):
        for mode in launch.options["modes"]:
            chunks, optimizer = tiny.build(mode)
            losses = tiny.train(chunks, optimizer, steps=5, world=world, rank=rank)
            measured = measure_bytes(chunks, optimizer)
            another = tiny.build(mode, seed=1)
            report[mode] = {
                "losses": losses,
                "another": tiny.train(*another, steps=5, world=world, rank=rank),
                "per_parameter": round(measured.per_parameter, 6),
                "total": measured.total,
                "sharded": measured.parts["exp_avg"].sharded,
            }
    return report
