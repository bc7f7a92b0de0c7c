"""AReaL's MegatronEngine on a CPU, with stand-ins for what a CPU lacks.

Megatron is real, and so are the engine's ``__init__``, ``initialize``, ``_create_optimizer``,
``optimizer_zero_grad``, ``optimizer_step``, ``save``, ``load``, configs and checkpoint manager.

Stand-ins: a tiny GPT of Megatron's, in a DDP of the engine's config, replaces the model that
mbridge builds of TransformerEngine's layers. The tests have no tokenizer, no lock and no device.
The tests in this process make the calls of ``train_batch`` without its packed sequences, which need
flash-attn. The engine in a worker process of AReaL's (``stay_on_cpu``) runs ``train_batch`` itself;
the model reads the packed sequences of a micro-batch as one sequence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
from typing import Any

import pytest
import torch

from precision_shim_tools.testing import megatron_on_cpu, stand_in_transformer_engine, tiny_gpt
from precision_shim_tools.testing.megatron_cpu import _CudaMeansCpu

from ..stand_ins.megatron_bridge import import_with_placeholders

MODULE = "areal.engine.megatron_engine"
METHODS = ("__init__", "initialize", "optimizer_step")
"""The methods of the engine that the shim wraps."""

OVERFLOW = 1e30


def import_engine() -> types.ModuleType:
    """Import AReaL's engine module while TransformerEngine is absent."""
    return import_with_placeholders(MODULE)


class _Torch(types.ModuleType):
    """The module torch, in which every device is the CPU."""

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: torch.device("cpu")) if name == "device" else getattr(torch, name)


def _model(hf_config: Any, tf_config: Any, mcore_config: Any, **others: Any) -> list[Any]:
    """Wrap a model as the last branch of AReaL's ``make_mcore_model`` does."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    torch.manual_seed(0)
    model = hf_config.provider()
    own = model.forward

    def forward(*args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        return own(*args, **kwargs)  # Megatron's own attention refuses packed sequences

    model.forward = forward
    if tf_config.params_dtype is not torch.float32:
        model = Float16Module(tf_config, model)
    ddp_config = DistributedDataParallelConfig(**dataclasses.asdict(mcore_config.ddp))
    return [DistributedDataParallel(tf_config, ddp_config, model)]


def _configs(path: str, dtype: torch.dtype, **others: Any) -> tuple[Any, Any]:
    provider = tiny_gpt(dtype)
    config = provider.config  # type: ignore[attr-defined]
    return types.SimpleNamespace(provider=provider, model_type="tiny"), config


def _stand_in(patch: pytest.MonkeyPatch) -> types.ModuleType:
    """Import AReaL's engine module and put the stand-ins in place."""
    module = import_engine()
    for name, value in {
        "torch": _Torch("torch"),
        "DistributedLock": lambda _: None,
        "load_hf_tokenizer": lambda _: None,
        "make_hf_and_mcore_config": _configs,
        "configure_pipeline_layer_splits": lambda strategy, hf, tf: tf,
        "is_valid_vision_model": lambda _: False,
        "requires_padded_seq": lambda _: False,
        "make_mcore_model": _model,
        "get_seed": lambda: 0,
    }.items():
        patch.setattr(module, name, value)
    for name in ("_build_hf_mcore_bridge", "_load_model_from_hf"):
        patch.setattr(module.MegatronEngine, name, lambda *_: None)
    return module


@pytest.fixture
def on_cpu(one_process: Any, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """AReaL's engine module with the stand-ins in place."""
    module = _stand_in(monkeypatch)
    for name, value in {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    return module


def stay_on_cpu() -> None:
    """Put the stand-ins in place in a process of a job, and never take them out.

    AReaL's RPC server imports the engine in one thread and calls it in another; device names are
    replaced for each thread separately, so the first call replaces them again.
    """
    stack = contextlib.ExitStack()
    module = _stand_in(pytest.MonkeyPatch())
    stack.enter_context(stand_in_transformer_engine())
    stack.enter_context(megatron_on_cpu())
    make_groups = module.MegatronEngine.create_process_group

    def create_process_group(self: Any, *args: Any, **kwargs: Any) -> None:
        stack.enter_context(_CudaMeansCpu())
        make_groups(self, *args, **kwargs)

    module.MegatronEngine.create_process_group = create_process_group
    module.MegatronEngine.seen_by_the_test = seen
    _kept.append(stack)


_kept: list[contextlib.ExitStack] = []


def seen(made: Any) -> dict[str, Any]:
    """What an engine's process has of the shim."""
    import precision_shim

    module = sys.modules[MODULE]
    places = {
        **{name: vars(module.MegatronEngine)[name] for name in METHODS},
        "get_megatron_optimizer": module.get_megatron_optimizer,
    }
    status = precision_shim.status()
    return {
        "enabled": status.enabled,
        "patched": [name for name, one in places.items() if hasattr(one, "_self_precision_shim")],
        "decided": [f"{one.feature}: {one.chosen}" for one in status.decisions],
    }


def config(
    dtype: str = "bfloat16",
    *,
    optimizer: dict[str, Any] | None = None,
    ddp: dict[str, Any] | None = None,
    **megatron: Any,
) -> Any:
    """A ``TrainEngineConfig`` of AReaL."""
    from areal.api import cli_args

    return cli_args.TrainEngineConfig(
        experiment_name="tests",
        trial_name="one",
        path="none",
        dtype=dtype,
        optimizer=cli_args.OptimizerConfig(
            **{"lr": 1e-2, "warmup_steps_proportion": 0.0, **(optimizer or {})}
        ),
        megatron=cli_args.MegatronEngineConfig(
            ddp=cli_args.DistributedDataParallelConfig(**(ddp or {})), **megatron
        ),
    )


def engine(module: Any, asked: Any) -> Any:
    """An engine that has built its model and its optimizer."""
    import logging

    from areal.api import FinetuneSpec

    made = module.MegatronEngine(asked)
    made.logger = logging.getLogger("tests")  # as create_process_group has it
    made.initialize(None, FinetuneSpec(total_train_epochs=1, dataset_size=8, train_batch_size=1))
    return made


def train(made: Any, number: int, weight: float = 1.0) -> dict[str, float]:
    """Train one step with the calls of ``train_batch``, in the same order."""
    made.optimizer_zero_grad()
    multiplier = made.optimizer.get_loss_scale().item()
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 32, (4, 8), generator=generator)
    (model,) = made.model
    loss = model(tokens, torch.arange(8).expand(4, 8), None, labels=tokens).float().mean()
    (loss * weight * multiplier).backward()
    model.finish_grad_sync()
    figures: dict[str, float] = made.optimizer_step()
    return figures


def scalers(made: Any) -> list[Any]:
    """The loss scalers of the engine's optimizers."""
    return [one.grad_scaler for one in made.optimizer.chained_optimizers]


def parameters(made: Any) -> list[torch.Tensor]:
    return [one.detach().clone() for one in made.model.parameters()]
