"""Writes the weights of a job's processes to files.

verl imports this module in each of its processes, in addition to the demo's stand-ins. The module
does not change what the trainer or the engine computes.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import torch
import wrapt
from examples.demo.rl import on_cpu  # noqa: F401  # the stand-ins, before the rest of verl

from . import megatron_on_cpu

FOLDER = Path(os.environ["RL_PROBES"])


def _write(name: str, weights: dict[str, Any]) -> None:
    unfinished = FOLDER / f".{name}"
    torch.save(weights, unfinished)
    unfinished.rename(FOLDER / name)


def _trainer(module: Any) -> None:
    """Write the trainer's fp32 masters each time the trainer sends its weights."""
    sync = itertools.count()
    send = module.FSDPEngine.get_per_tensor_param

    def sent(self: Any, *given: Any, **named: Any) -> Any:
        state = self.module.state_dict()
        whole = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in state.items()}
        _write(f"trainer0-{next(sync)}.pt", {n: t.detach().clone() for n, t in whole.items()})
        return send(self, *given, **named)

    module.FSDPEngine.get_per_tensor_param = sent


def _megatron(module: Any) -> None:
    """The same for Megatron: each rank writes its weights and its share of the optimizer."""
    from torch.distributed import get_rank

    sync = itertools.count()
    send = module.MegatronEngine.get_per_tensor_param

    def sent(self: Any, *given: Any, **named: Any) -> Any:
        number = next(sync)
        (chunk,) = self.module
        weights = {n: p.detach().clone() for n, p in module.unwrap_model(chunk).named_parameters()}
        _write(f"trainer{get_rank()}-{number}.pt", weights)
        _write(f"optimizer{get_rank()}-{number}.pt", _states(self.optimizer, chunk))
        return send(self, *given, **named)

    module.MegatronEngine.get_per_tensor_param = sent


def _states(optimizer: Any, chunk: Any) -> dict[str, Any]:
    """What a rank's one distributed optimizer holds, bucket and main gradients too."""
    (one,) = optimizer.chained_optimizers
    inner = one.optimizer
    held = [(p, inner.state.get(p, {})) for group in inner.param_groups for p in group["params"]]
    copied = {
        f"{index}.{name}": value.detach().clone()
        for index, (stepped, state) in enumerate(held)
        for name, value in ({"stepped": stepped} | state).items()
        if isinstance(value, torch.Tensor)
    }
    return {
        "states": copied,
        "steps": [group.get("step") for group in inner.param_groups],
        "scaler": one.grad_scaler.state_dict() if one.grad_scaler else None,
        "precision-aware": one.config.use_precision_aware_optimizer,
        "buckets": sorted({str(buffer.grad_data.dtype) for buffer in one.buffers}),
        "main grads": sorted({str(p.main_grad.dtype) for p in chunk.parameters()}),
    }


def _engine(module: Any) -> None:
    """Write the engine's weights after each sync, in the worker that collective_rpc calls."""
    sync = itertools.count()
    extension = module.vLLMColocateWorkerExtension
    receive = extension.update_weights_from_ipc

    def received(self: Any, *given: Any, **named: Any) -> Any:
        answer = receive(self, *given, **named)
        held = self.model_runner.model.named_parameters()
        replica = os.environ.get("VERL_REPLICA_RANK", "0")
        _write(f"engine{replica}-{next(sync)}.pt", {n: p.detach().clone() for n, p in held})
        return answer

    extension.update_weights_from_ipc = received


wrapt.register_post_import_hook(_trainer, "verl.workers.engine.fsdp.transformer_impl")
for hook in (megatron_on_cpu.prepare, _megatron):
    wrapt.register_post_import_hook(hook, "verl.workers.engine.megatron.transformer_impl")
wrapt.register_post_import_hook(_engine, "verl.workers.rollout.vllm_rollout.utils")
