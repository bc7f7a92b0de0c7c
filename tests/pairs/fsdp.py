"""The rank processes of a pair on verl's FSDP engine; ``processes/rank_server.py`` starts them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from ..processes.rank_server import Launch, look_ahead
from ..stand_ins.tiny_models import make_checkpoint
from ..verl import fsdp_support as support
from . import processes
from .drawing import OFF, Job, Pair

COMPUTED = {"fp16": "fp16", "bf16": "bf16", "fp32": "fp32", "bf16-stored": "bf16"}
STORED = {"bf16-stored": "bf16"}


def prepare() -> None:
    """Import verl and write a model in the server."""
    support.prepare()
    look_ahead("verl")
    make_checkpoint(Path(os.environ["MODEL"]))


class Training:
    """Trains verl's FSDP engine; see ``processes.Training``."""

    def __init__(self, pair: Pair, job: Job) -> None:
        self.asked = {"precision": COMPUTED[job.dtype]}
        fields = {"param_offload": True, "optimizer_offload": True} if job.offload else {}
        self.engine = one = support.engine(
            os.environ["MODEL"],
            param_dtype=COMPUTED[job.dtype],
            model_dtype=STORED.get(job.dtype, "fp32"),
            **fields,
        )
        if job.shim == OFF or not job.has("fp16-scaling"):
            own = getattr(one, "scaler", None)
            if own is not None and not own.is_enabled():  # torch disables the scaler without a GPU
                one.scaler = ShardedGradScaler(device="cpu", growth_interval=400)
        generator = torch.Generator().manual_seed(100 + int(job.seed) + 10 * dist.get_rank())
        with torch.no_grad():  # so that engines start with different weights
            for parameter in one.module.parameters():
                shard = support.local(parameter)
                shard.add_(torch.randn(shard.shape, generator=generator) * 1e-3)

    def steps(self, steps: range, overflows: tuple[int, ...]) -> list[list[Any]]:
        """See ``processes.Training``; each step also has the scale, after the norm."""
        said = []
        for step in steps:
            ((*losses, norm),) = support.train(self.engine, range(step, step + 1), overflows)
            said.append([*processes.numbers([*losses, norm]), self._scaler()[0]])
        return said

    def state(self) -> dict[str, Any]:
        """See ``processes.Training``."""
        optimizer = self.engine.optimizer
        moments: dict[str, list[torch.Tensor]] = {}
        for _, one in sorted(optimizer.state_dict()["state"].items()):
            for name, value in one.items():
                moments.setdefault(name, []).append(
                    support.local(torch.as_tensor(value).detach()).reshape(-1)
                )
        scale, tracker, counts = self._scaler()
        return {
            "parameters": processes.bits(support.parameters(self.engine.module)),
            **{name: processes.bits(values) for name, values in moments.items()},
            "lr": processes.numbers(one["lr"] for one in optimizer.param_groups),
            "scale": scale,
            "tracker": tracker,
            "counts": counts,
        }

    def effective(self) -> dict[str, Any]:
        """See ``processes.Training``."""
        scaler = getattr(self.engine, "scaler", None)
        state = {} if scaler is None else scaler.state_dict()
        return {
            "parameters": str(next(self.engine.module.parameters()).dtype),
            "computed": str(self.engine.engine_config.mixed_precision),
            "settings": [
                state.get(name) for name in ("growth_interval", "growth_factor", "backoff_factor")
            ],
        }

    def save(self, directory: Path) -> None:
        """See ``processes.Training``."""
        self.engine.save_checkpoint(str(directory), global_step=1)

    def load(self, directory: Path) -> None:
        """See ``processes.Training``."""
        self.engine.load_checkpoint(str(directory), del_local_after_load=False)

    def _scaler(self) -> tuple[Any, Any, Any]:
        scaler = getattr(self.engine, "scaler", None)
        if scaler is None or not scaler.is_enabled():
            return None, None, None
        state = scaler.state_dict()
        counter = getattr(scaler, "counter", None)
        return (
            float(state["scale"]),
            int(state["_growth_tracker"]),
            [counter.steps, counter.skipped, counter.in_row] if counter else None,
        )


def run(launch: Launch) -> dict[str, Any]:
    """Run a rank from its start to its end."""
    launch.join()
    found = processes.run(launch, Training)
    if found["error"] is None:  # after an error other ranks might never reach the barrier
        dist.barrier()
    return found
