"""An fp16 training loop under FSDP2, with torch's loss scaler or with the shim's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from precision_shim import scaling

FIRST_SCALE = 2.0**12
GROWTH_INTERVAL = 3
LAYERS = 4
ROWS = 16


class Loop:
    """A model with its AdamW and its loss scaler, and the training step.

    Args:
        ours: use the shim's LossScaler; otherwise torch's, as torch's documentation shows.
        device: ``"cuda"`` or ``"cpu"``.
        wide: make the layers 2048 wide instead of 32, so that a GPU has some work.
        seed: seed of the initial parameters.
    """

    def __init__(self, ours: bool, device: str, *, wide: bool, seed: int = 0) -> None:
        width = 2048 if wide else 32
        torch.manual_seed(seed)
        self.ours = ours
        self.device = device
        layers = (torch.nn.Linear(width, width) for _ in range(LAYERS))
        stack = [one for layer in layers for one in (layer, torch.nn.GELU())]
        self.model = torch.nn.Sequential(*stack).to(device)
        policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
        mesh = init_device_mesh(device, (1,))
        for layer in self.model:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)
        self.scaler = self._scaler()
        generator = torch.Generator().manual_seed(0)
        self.batches = torch.randn(8, ROWS, width, generator=generator).to(device)
        self._next = 0

    def _scaler(self) -> Any:
        if not self.ours:
            return ShardedGradScaler(
                device=self.device, init_scale=FIRST_SCALE, growth_interval=GROWTH_INTERVAL
            )
        settings = scaling.ScalerSettings(init_scale=FIRST_SCALE, growth_interval=GROWTH_INTERVAL)
        return scaling.LossScaler(settings, device=self.device)

    def step(self, weight: float, number: int | None = None) -> None:
        """Train on one batch: forward, backward, unscale, clip, step, update.

        Args:
            weight: factor of the loss.
            number: index of the batch; by default the next batch.
        """
        batch = self.batches[self._next if number is None else number]
        self._next += 1
        self.optimizer.zero_grad()
        loss = (self.model(batch).float() - batch).square().mean() * weight
        if self.ours:
            self.scaler.attach(loss)
            loss.backward()
            self.scaler.unscale_once(self.optimizer)
        else:
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def held(self) -> dict[str, torch.Tensor]:
        """Copies of parameters and moments."""
        found = {}
        for name, param in self.model.named_parameters():
            found[f"{name} param"] = local(param)
            for key, value in self.optimizer.state.get(param, {}).items():
                found[f"{name} {key}"] = local(value)
        return found

    def save(self, folder: Path) -> None:
        """Save model and optimizer with torch's distributed checkpoint, and the scaler's state."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state_dict_saver.save({"model": model, "optimizer": optimizer}, checkpoint_id=str(folder))
        scaling.save(folder, self.scaler)

    def load(self, folder: Path) -> None:
        """Load a checkpoint that ``save`` wrote."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        state_dict_loader.load(state, checkpoint_id=str(folder))
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        if scaling.load(folder, self.scaler) is None:
            raise RuntimeError(f"{folder} has no state of the scaler")


def local(value: torch.Tensor) -> torch.Tensor:
    """A copy of this rank's shard."""
    shard = value.to_local() if hasattr(value, "to_local") else value
    return shard.detach().clone()
