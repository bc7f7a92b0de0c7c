"""What a job's processes hold, written to files; and sampling that a second job repeats.

verl imports this module in each of its processes, beside the demo's stand-ins. It changes nothing
that trainer or engine compute.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import torch
import wrapt
from examples.demo.rl import on_cpu  # noqa: F401  # the stand-ins, before the rest of verl

from . import megatron_on_cpu  # noqa: F401

FOLDER = Path(os.environ["RL_PROBES"])


def _write(name: str, weights: dict[str, torch.Tensor]) -> None:
    unfinished = FOLDER / f".{name}"
    torch.save(weights, unfinished)
    unfinished.rename(FOLDER / name)


def _trainer(module: Any) -> None:
    """Write the trainer's weights each time it sends them: its masters, before any rounding."""
    sync = itertools.count()
    send = module.FSDPEngine.get_per_tensor_param

    def sent(self: Any, *given: Any, **named: Any) -> Any:
        state = self.module.state_dict()
        whole = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in state.items()}
        _write(f"trainer-{next(sync)}.pt", {n: t.detach().clone() for n, t in whole.items()})
        return send(self, *given, **named)

    module.FSDPEngine.get_per_tensor_param = sent


def _engine(module: Any) -> None:
    """Write the engine's weights after each sync, in the worker that collective_rpc reaches."""
    sync = itertools.count()
    extension = module.vLLMColocateWorkerExtension
    receive = extension.update_weights_from_ipc

    def received(self: Any, *given: Any, **named: Any) -> Any:
        answer = receive(self, *given, **named)
        held = self.model_runner.model.named_parameters()
        _write(f"engine-{next(sync)}.pt", {n: p.detach().clone() for n, p in held})
        return answer

    extension.update_weights_from_ipc = received


wrapt.register_post_import_hook(_trainer, "verl.workers.engine.fsdp.transformer_impl")
wrapt.register_post_import_hook(_engine, "verl.workers.rollout.vllm_rollout.utils")
