"""Probes run torch to test the shim's assumptions about torch's optimizers and gradient scalers."""

from __future__ import annotations

import torch

from precision_shim.adapting import Answer, probe


@probe(
    "AdamW's states follow the parameters",
    assumes="torch's AdamW keeps both moments in the dtype of its parameters",
    rule="precision_shim_adapters.fp16.training",
    needs=(
        "torch._dynamo",
    ),  # an optimizer's first step imports torch._dynamo, which takes seconds
)
def states_follow() -> Answer:
    """The shim does not change the dtype of an FSDP optimizer's states."""
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = optimizer.state[parameter]
    found = {name: str(state[name].dtype) for name in ("exp_avg", "exp_avg_sq")}
    return Answer(dict.fromkeys(found, "torch.bfloat16"), found)


@probe(
    "torch's scaler skips and halves",
    assumes="GradScaler takes no step on a gradient that is not finite, halves its scale, and "
    "saves five values",
    rule="precision_shim.scaling.scaler",
    needs=("torch.amp",),
)
def scaler_skips() -> Answer:
    """The shim adds to torch's scaler a minimum scale, and an agreement of ranks on overflows."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(parameter.sum())
    parameter.grad = torch.full((2,), float("inf"))
    scaler.step(optimizer)
    scaler.update()
    saved = {
        "scale": 4.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 0,
    }
    found = (parameter.tolist(), scaler.get_scale(), scaler.state_dict())
    return Answer(([1.0, 1.0], 4.0, saved), found)


@probe(
    "a distributed checkpoint steps the optimizer",
    assumes="torch's distributed checkpoint calls optimizer.step() once on a dummy batch to make "
    "the states of an optimizer that has none",
    rule="precision_shim.scaling.scaler",
    needs=("torch.distributed.checkpoint.state_dict",),
)
def checkpoint_steps() -> Answer:
    """The scaler must not count torch's call of ``step()`` with dummy gradients at a checkpoint."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    steps: list[bool] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(True))
    get_optimizer_state_dict(model, optimizer)
    return Answer(1, len(steps))
