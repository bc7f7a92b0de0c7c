"""ms-swift's Megatron trainer on a CPU, with stand-ins for what a CPU lacks.

Megatron and its schedule are real, and so are the fields of the trainer's arguments and their
effect on dtypes. The trainer's ``__init__``, ``prepare_model``, ``get_optimizer_and_scheduler``,
``wrap_model``, ``train_step``, ``on_log``, ``save_checkpoint`` and ``load_mcore_checkpoint`` are
real, too.

Stand-ins: a tiny GPT of Megatron's replaces the model that mcore-bridge builds of
TransformerEngine's layers. No weights are loaded, and no compiled functions are warmed up.

``on_cpu`` has the stand-ins for a test's own process. There arguments are made without
``__post_init__``, which looks for a model and for GPUs, and batches are random tokens. ``enter``
puts the stand-ins in place in a process that ms-swift has started. There arguments, pipeline,
dataset and batches are ms-swift's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
import types
from functools import partial
from typing import Any

import pytest
import torch

from precision_shim_tools.testing import megatron_on_cpu, tiny_gpt

from ..stand_ins.megatron_bridge import import_with_placeholders

MODULE = "swift.megatron.trainers.base"
ARGUMENTS = "swift.megatron.arguments"
RLHF = "swift.megatron.trainers.rlhf_mixin"
OVERFLOW = 1e30
_FOR_GOOD = contextlib.ExitStack()


def import_trainer(*others: str) -> types.ModuleType:
    """Import ms-swift's trainer module, and others of ms-swift, without TransformerEngine.

    mcore-bridge patches layers that Megatron has only if TransformerEngine is installed. While
    mcore-bridge is imported, an empty class replaces each layer that is missing.
    """
    import megatron.core.extensions.transformer_engine as layers

    absent = [name for name, one in vars(layers).items() if name.startswith("TE") and one is None]
    for name in absent:
        setattr(layers, name, type(name, (torch.nn.Module,), {}))
    try:
        return import_with_placeholders(MODULE, *others)
    finally:
        for name in absent:
            setattr(layers, name, None)


@pytest.fixture
def on_cpu(one_process: Any, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """ms-swift's trainer module with the stand-ins in place."""
    module = import_trainer()
    monkeypatch.setattr(module, "get_mcore_model", _models)
    monkeypatch.setattr(module, "warmup_jit_function", lambda *_: None)
    return module


def enter() -> None:
    """Put the stand-ins in place for good, in a process that ms-swift has started."""
    module = import_trainer(ARGUMENTS, RLHF)
    _FOR_GOOD.enter_context(megatron_on_cpu())
    vars(torch.cuda)["max_memory_reserved"] = lambda: 0
    module.warmup_jit_function = lambda *_: None
    for one in (module, sys.modules[RLHF]):
        one.get_mcore_model = _models
    gc.freeze()  # ms-swift collects garbage in each step


class _Bridge:
    """Stands in for mcore-bridge: there are no weights to load, and no engine takes them."""

    def load_weights(self, *_: Any, **__: Any) -> None: ...

    def export_weights(self, models: list[Any], **_: Any) -> Any:
        return iter(models[0].state_dict().items())


def _models(args: Any, _: Any) -> list[Any]:
    torch.manual_seed(0)
    provider = tiny_gpt(args.torch_dtype or torch.float32)
    model = provider()
    model.config.bridge = _Bridge()
    return [model]


def arguments(**asked: Any) -> Any:
    """ms-swift's arguments as ``megatron sft`` completes them."""
    from swift.megatron.arguments.megatron_args import MegatronArguments

    args = object.__new__(MegatronArguments)
    for one in dataclasses.fields(MegatronArguments):
        made = one.default
        if one.default_factory is not dataclasses.MISSING:
            made = one.default_factory()
        setattr(args, one.name, made)
    own = {
        "lr": 1e-2,
        "lr_decay_style": "constant",
        "micro_batch_size": 4,
        "global_batch_size": 4,
        "seq_length": 8,
        "train_iters": 100,
        "task_type": "causal_lm",
        "check_model": False,
        "router_replay_mode": "disabled",
        "new_special_tokens": [],
        "is_multimodal": False,
        "model_dir": None,
        "loss_scale": "last_round",  # how it weights tokens
        "weight_decay": 0.01,
        "num_microbatches": 1,
        "eval_iters": 0,
        "save_safetensors": False,
    }
    for name, value in {**own, **asked}.items():
        setattr(args, name, value)
    args._map_dtype()
    args._init_weigh_decay()
    return args


def trainer(module: Any, args: Any) -> Any:
    """A trainer that has built its model and its optimizer."""

    class Trainer(module.BaseMegatronTrainer):  # type: ignore[misc, name-defined]
        def forward_step(self, data_iterator: Any, model: Any) -> Any:
            number, weight = next(data_iterator)
            generator = torch.Generator().manual_seed(number)
            tokens = torch.randint(0, 32, (4, 8), generator=generator)
            output = model(tokens, torch.arange(8).expand(4, 8), None, labels=tokens)
            return output, partial(self.loss_func, weight=weight)

        def loss_func(self, output: Any, *, weight: float) -> Any:
            loss = output.float().mean()
            return loss * weight, {"loss": loss.detach().clone()}

        def _get_data_collator(self) -> Any:
            return None

    template = types.SimpleNamespace(padding_free=args.padding_free, config=None)
    made = Trainer(args, template)
    made.setup_model_training()
    return made


def train(made: Any, number: int, weight: float = 1.0) -> dict[str, Any]:
    """Take a step as ms-swift does; returns the values that it logs."""
    logged: dict[str, Any] = {}
    made.state.should_log = True
    own = made.call_event

    def listen(event: str, **kwargs: Any) -> None:
        logged.update(kwargs.get("logs", {}))
        own(event, **kwargs)

    made.call_event = listen
    try:
        made.run_train_step(iter([(number, weight)]), None)
    finally:
        made.call_event = own
    return logged


def scalers(made: Any) -> list[Any]:
    return [one.grad_scaler for one in made.optimizer.chained_optimizers]


def parameters(made: Any) -> list[torch.Tensor]:
    return [one.detach().clone() for model in made.wrapped_models for one in model.parameters()]
