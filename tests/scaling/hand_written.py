"""The same fp16 training loop twice: with torch's scaler written by hand, and with our scaler.

Besides its arithmetic, a step costs the time that it waits for transfers from the device and for
collectives. The calls of torch's functions for transfers and collectives are counted, so that a CPU
counts what a GPU would wait for.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from precision_shim.scaling import LossScaler, ScalerSettings

READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")
"""Tensor methods that copy a value to the host, and so wait for the device."""


class CountReads(TorchFunctionMode):
    """Counts how often the host reads a value."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += getattr(func, "__name__", "") in READS
        return func(*args, **(kwargs or {}))


class CountCollectives(TorchDispatchMode):
    """Counts collectives, including those that DTensor or FSDP starts."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        space, _, name = func._schema.name.partition("::")
        self.count += space in {"c10d", "_c10d_functional"} and "wait" not in name
        return func(*args, **(kwargs or {}))


class Loop:
    """Trains a model under FSDP2, with micro-batches and clipping."""

    def __init__(self, ours: bool, width: int = 64):
        torch.manual_seed(0)
        self.ours = ours
        self.model = torch.nn.Sequential(
            *(layer for _ in range(4) for layer in (torch.nn.Linear(width, width), torch.nn.GELU()))
        )
        policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)
        settings = ScalerSettings(init_scale=2.0**12, growth_interval=5)
        self.scaler = (
            LossScaler(settings, device="cpu")
            if ours
            else ShardedGradScaler(device="cpu", init_scale=2.0**12, growth_interval=5)
        )
        self.batch = torch.randn(16, width)

    def step(self, weight: float = 1.0):
        """Run two micro-batches, clip and step; returns the figures that a framework reports."""
        self.optimizer.zero_grad()
        for _ in range(2):
            loss = (self.model(self.batch).float() - self.batch).square().mean() * weight / 2
            if self.ours:
                self.scaler.attach(loss)
                loss.backward()
            else:
                self.scaler.scale(loss).backward()
        if self.ours:
            self.scaler.unscale_once(self.optimizer)
        else:
            self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.ours:
            return self.scaler.loss_scale, self.scaler.counter.skipped
        return None

    def count(self, weight: float = 1.0) -> dict[str, int]:
        """Count the host's reads and the collectives of one step."""
        reads, collectives = CountReads(), CountCollectives()
        with collectives, reads:
            self.step(weight)
        return {"reads": reads.count, "collectives": collectives.count}
