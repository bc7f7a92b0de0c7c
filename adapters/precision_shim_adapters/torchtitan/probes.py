"""Probes that check the shim's assumptions about the installed torchtitan."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any, get_args
from unittest import mock

import torch

from precision_shim.adapting import Answer, probe

from .places import OWN_NAMES

_CONFIGS = "torchtitan.config.configs"
_RL = "torchtitan.experiments.rl.actors.trainer"


class _Step:
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
        for parameter in self.layer.parameters():
            parameter.grad = torch.full_like(parameter, float("inf"))
        return torch.zeros(())


@probe(
    "torchtitan's names of dtypes",
    assumes="a dict knows three, and nothing else is looked up",
    rule="precision_shim_adapters.torchtitan.places:OWN_NAMES",
    needs=("torchtitan.config",),
)
def names() -> Answer:
    """The shim replaces every spelling of a dtype by one of torchtitan's three names."""
    from torchtitan.config import TORCH_DTYPE_MAP

    return Answer({name: dtype for dtype, name in OWN_NAMES.items()}, dict(TORCH_DTYPE_MAP))


@probe(
    "torchtitan's defaults and its command line",
    assumes="parameters are float32 and computed with in bfloat16 by default; the command line "
    "knows these two names only",
    rule="precision_shim_adapters.torchtitan.names:parse_args",
    needs=(_CONFIGS,),
)
def defaults() -> Answer:
    """float16 is never a default, and the shim makes the command line accept it."""
    from torchtitan.config.configs import TrainingConfig

    made, kinds = TrainingConfig(), TrainingConfig.__annotations__
    found = {
        name: (getattr(made, name), sorted(get_args(kinds[name])))
        for name in ("dtype", "mixed_precision_param")
    }
    known = ["bfloat16", "float32"]
    return Answer(
        {"dtype": ("float32", known), "mixed_precision_param": ("bfloat16", known)}, found
    )


@probe(
    "torchtitan steps on a gradient that is not finite",
    assumes="Trainer.train_step clips, steps and schedules whatever the norm is, without an error",
    rule="precision_shim_adapters.torchtitan.pretraining:train_step",
    needs=("torchtitan.trainer",),
)
def train_step() -> Answer:
    """torchtitan has no loss scaler; the shim's scaler skips a step whose norm is infinite."""
    from torchtitan.trainer import Trainer

    trainer = _Step()
    Trainer.train_step(trainer, iter([({}, torch.zeros(1, 1, dtype=torch.long))]))
    return Answer(["step", "schedule"], trainer.called)


@probe(
    "torchtitan's RL trainer steps on a gradient that is not finite",
    assumes="PolicyTrainer.optim_step is an endpoint of Monarch's over a method that clips, steps, "
    "schedules, and reports the norm, whatever it is",
    rule="precision_shim_adapters.torchtitan.rl:make_endpoint",
    needs=("monarch.actor", _RL),
)
def optim_step() -> Answer:
    """The shim replaces ``optim_step`` by an endpoint whose scaler steps the optimizers."""
    from torchtitan.experiments.rl.actors.trainer import PolicyTrainer

    method = PolicyTrainer.optim_step._method.__wrapped__
    trainer = _Step()
    trainer.forward_backward_step()
    output = asyncio.run(method(trainer))
    norm = output.metrics.get("trainer/grad_norm/mean")
    return Answer(
        (["step", "schedule"], True, 1),
        (trainer.called, norm is not None and math.isinf(norm), trainer.policy_version),
    )


@probe(
    "the chunked loss goes back by itself",
    assumes="ChunkedLossWrapper goes back through what its inner loss returns for each chunk, "
    "while it is called, with the gradients as that loss makes them",
    rule="precision_shim_adapters.torchtitan.scaled:scale_innermost",
    needs=("torchtitan.components.loss",),
)
def chunked_loss() -> Answer:
    """The shim scales the inner loss, whose backward pass ``ChunkedLossWrapper`` runs."""
    from torchtitan.components.loss import ChunkedLossWrapper

    wrapper = ChunkedLossWrapper(ChunkedLossWrapper.Config(num_chunks=2))
    head = torch.nn.Linear(1, 1, bias=False)
    wrapper.set_lm_head(head)
    wrapper.loss_fn = lambda logits, labels, tokens, **rest: (logits.sum(), {})
    hidden = torch.ones(1, 4, 1, requires_grad=True)
    wrapper(hidden, torch.zeros(1, 4, dtype=torch.long))
    found = None if head.weight.grad is None else head.weight.grad.item()
    return Answer(4.0, found)


@probe(
    "states are made by a step that counts",
    assumes="init_optim_state takes a step that counts, and does nothing where a gradient is set",
    rule="precision_shim_adapters.torchtitan.scaled:init_optim_state",
    needs=("torchtitan.components.optimizer.utils",),
)
def initial_states() -> Answer:
    """The shim hides the gradients from ``init_optim_state`` and resets the step count to 0."""
    from torchtitan.components.optimizer.utils import init_optim_state

    found = []
    for gradient in (None, torch.ones(1)):
        parameter = torch.nn.Parameter(torch.ones(1))
        parameter.grad = gradient
        optimizer = torch.optim.AdamW([parameter])
        init_optim_state(optimizer)
        found.append([float(state["step"]) for state in optimizer.state.values()])
    return Answer([[1.0], []], found)


@probe(
    "varlen attention is bfloat16",
    assumes="VarlenAttention casts what it is given to bfloat16, and the result back",
    rule="precision_shim_adapters.torchtitan.attention:keep_float16",
    needs=("torchtitan.models.common.attention",),
)
def attention() -> Answer:
    """The shim's attention function computes in float16 instead of bfloat16."""
    from torchtitan.models.common import attention as module

    seen = []

    def kernel(query: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        seen.append(query.dtype)
        return query

    ends = torch.tensor([0, 2], dtype=torch.int32)
    with mock.patch.object(module, "varlen_attn", kernel):
        made = module.VarlenAttention.forward(
            SimpleNamespace(window_size=(-1, 0)),
            *[torch.ones(1, 2, 1, 1, dtype=torch.float16)] * 3,
            attention_masks=module.VarlenMetadata(ends, ends, 2, 2),
        )
    return Answer(([torch.bfloat16], torch.float16), (seen, made.dtype))
