"""What the shim assumes of torch's optimizers and gradient scalers."""

from __future__ import annotations

import torch


def test_the_states_of_adamw_follow_the_parameters() -> None:
    """The shim does not change the dtype of an FSDP optimizer's states."""
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = optimizer.state[parameter]
    assert state["exp_avg"].dtype is state["exp_avg_sq"].dtype is torch.bfloat16


def test_the_scaler_skips_and_halves() -> None:
    """The shim adds to torch's scaler a minimum scale, and an agreement of ranks on overflows."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(parameter.sum())
    parameter.grad = torch.full((2,), float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [1.0, 1.0]
    assert scaler.get_scale() == 4.0
    assert scaler.state_dict() == {
        "scale": 4.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 0,
    }


def test_a_distributed_checkpoint_steps_the_optimizer() -> None:
    """The scaler must not count torch's call of ``step()`` with dummy gradients at a checkpoint."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    steps: list[bool] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(True))
    get_optimizer_state_dict(model, optimizer)
    assert len(steps) == 1
