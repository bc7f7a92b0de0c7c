"""What the shim assumes of torchtitan."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from precision_shim_adapters.torchtitan.config import OWN_NAMES


class Steps:
    """A fake trainer with one layer; ``called`` lists what torchtitan's step called."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.layer = torch.nn.Linear(1, 1)
        self.model_parts = [self.layer]
        self.config = SimpleNamespace(
            training=SimpleNamespace(max_norm=1.0, disable_cuda_graphs=True)
        )
        self.parallel_dims = SimpleNamespace(
            dp_enabled=False,
            pp_enabled=False,
            ep_enabled=False,
            get_optional_mesh=lambda name: None,
        )
        self.optimizers = SimpleNamespace(
            step=lambda: self.called.append("step"), zero_grad=lambda **options: None
        )
        self.lr_schedulers = SimpleNamespace(
            step=lambda: self.called.append("schedule"),
            get_metrics=dict,
            schedulers=[SimpleNamespace(get_last_lr=lambda: [1.0])],
        )
        self.metrics_processor = SimpleNamespace(should_log=lambda step: False)
        self.checkpointer = SimpleNamespace(maybe_wait_for_staging=lambda: None)
        self.gradient_accumulation_steps = self.num_pipeline_parallel_microbatches = 1
        self.step = self.policy_version = 0
        self.device = torch.device("cpu")

    def forward_backward_step(self, **batch: Any) -> torch.Tensor:
        """Set infinite gradients."""
        for parameter in self.layer.parameters():
            parameter.grad = torch.full_like(parameter, float("inf"))
        return torch.zeros(())


def test_the_names_of_dtypes() -> None:
    """The shim replaces every spelling of a dtype by one of torchtitan's three names."""
    from torchtitan.config import TORCH_DTYPE_MAP

    assert dict(TORCH_DTYPE_MAP) == {name: dtype for dtype, name in OWN_NAMES.items()}


def test_the_defaults_and_the_command_line() -> None:
    """float16 is never a default, and the shim makes the command line accept it."""
    from torchtitan.config.configs import TrainingConfig

    made, kinds = TrainingConfig(), TrainingConfig.__annotations__
    assert (made.dtype, made.mixed_precision_param) == ("float32", "bfloat16")
    for name in ("dtype", "mixed_precision_param"):
        assert sorted(get_args(kinds[name])) == ["bfloat16", "float32"]


def test_the_trainer_steps_on_an_overflow() -> None:
    """torchtitan has no loss scaler; the shim's scaler skips a step whose norm is infinite."""
    from torchtitan.trainer import Trainer

    trainer = Steps()
    Trainer.train_step(trainer, iter([({}, torch.zeros(1, 1, dtype=torch.long))]))
    assert trainer.called == ["step", "schedule"]


def test_the_rl_trainer_steps_on_an_overflow() -> None:
    """The shim replaces ``optim_step`` by an endpoint whose scaler steps the optimizers."""
    pytest.importorskip("monarch.actor")
    from torchtitan.experiments.rl.actors.trainer import PolicyTrainer

    method = PolicyTrainer.optim_step._method.__wrapped__
    trainer = Steps()
    trainer.forward_backward_step()
    output = asyncio.run(method(trainer))
    assert trainer.called == ["step", "schedule"]
    assert math.isinf(output.metrics["trainer/grad_norm/mean"])
    assert trainer.policy_version == 1


def test_the_chunked_loss_runs_its_backward_pass_itself() -> None:
    """The shim scales the inner loss, whose backward pass ``ChunkedLossWrapper`` runs."""
    from torchtitan.components.loss import ChunkedLossWrapper

    wrapper = ChunkedLossWrapper(ChunkedLossWrapper.Config(num_chunks=2))
    head = torch.nn.Linear(1, 1, bias=False)
    wrapper.set_lm_head(head)
    wrapper.loss_fn = lambda logits, labels, tokens, **rest: (logits.sum(), {})
    hidden = torch.ones(1, 4, 1, requires_grad=True)
    wrapper(hidden, torch.zeros(1, 4, dtype=torch.long))
    assert head.weight.grad is not None
    assert head.weight.grad.item() == 4.0


def test_states_are_made_by_a_step_that_counts() -> None:
    """The shim hides the gradients from ``init_optim_state`` and resets the step count to 0."""
    from torchtitan.components.optimizer.utils import init_optim_state

    for gradient, steps in ((None, [1.0]), (torch.ones(1), [])):
        parameter = torch.nn.Parameter(torch.ones(1))
        parameter.grad = gradient
        optimizer = torch.optim.AdamW([parameter])
        init_optim_state(optimizer)
        assert [float(state["step"]) for state in optimizer.state.values()] == steps


def test_varlen_attention_is_bfloat16() -> None:
    """The shim's attention function computes in float16 instead of bfloat16."""
    from torchtitan.models.common import attention

    seen = []

    def kernel(query: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        seen.append(query.dtype)
        return query

    ends = torch.tensor([0, 2], dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "varlen_attn", kernel)
        made = attention.VarlenAttention.forward(
            SimpleNamespace(window_size=(-1, 0)),
            *[torch.ones(1, 2, 1, 1, dtype=torch.float16)] * 3,
            attention_masks=attention.VarlenMetadata(ends, ends, 2, 2),
        )
    assert seen == [torch.bfloat16]
    assert made.dtype is torch.float16
