"""A user's plugin for ms-swift (``--external_plugins``): says what the trainer's process has.

With Ray, the plugin also has a reward that overflows, and the stand-in for vLLM.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

from swift.infer_engine.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    UsageInfo,
)
from swift.megatron.callbacks import MegatronCallback, megatron_callbacks_map
from swift.rewards import ORM, orms

import precision_shim

_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"

OVERFLOWS = (1, 2)
"""The steps, from 0, whose weights overflow."""


class Look(MegatronCallback):  # type: ignore[misc]
    """Writes what the trainer's process has, before the first step."""

    def on_train_begin(self) -> None:
        (model,) = self.trainer.wrapped_models
        found = {
            "shim": precision_shim.status().enabled,
            "buckets": [str(one.grad_data.dtype) for one in model.buffers],
            "check_for_nan_in_grad": model.ddp_config.check_for_nan_in_grad,
            "started_by": "torchrun" if _BY_TORCHRUN in os.environ else "ray",
        }
        Path(self.args.output_dir, "look.json").write_text(json.dumps(found), encoding="utf-8")


class Weights(ORM):  # type: ignore[misc]
    """Rewards 1 and 0 in turn; in the steps of ``OVERFLOWS`` 1e30 and 0."""

    step = -1

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        self.step += 1
        high = 1e30 if self.step in OVERFLOWS else 1.0
        return [high * (number % 2) for number, _ in enumerate(completions)]


class Engine:
    """Stands in for a replica of vLLM's engine, which answers "yes" and "no" in turn."""

    def __init__(self, mode: Any) -> None:
        self.mode = mode
        self.primary = None

    def generate(self, requests: list[Any], _: Any) -> Any:
        import ray

        def answer(word: str) -> Any:
            message = ChatMessage(role="assistant", content=word, tool_calls=None)
            choice = ChatCompletionResponseChoice(0, message, "stop")
            return ChatCompletionResponse("", [choice], UsageInfo(0, 0, 0))

        words = itertools.cycle(("yes", "no"))
        return ray.put([answer(next(words)) for _ in requests])

    def sleep(self, level: int = 1) -> None: ...

    def wake_up(self, tags: Any = None) -> None: ...

    def shutdown(self) -> None: ...


def _replace_vllm() -> None:
    """Let the driver's pipeline make the stand-in, and no worker look for vLLM's actor."""
    from swift.ray.megatron.pipeline import MegatronRayPipeline
    from swift.ray.megatron.rollout.replica import RolloutMode

    def init(self: Any) -> None:
        self.rollout_replicas = [Engine(RolloutMode.HYBRID)]

    MegatronRayPipeline._init_rollout_replicas = init
    MegatronRayPipeline._build_rollout_config_for_workers = lambda _: None


megatron_callbacks_map["look"] = Look
orms["weights"] = Weights
if "swift.ray.megatron.pipeline" in sys.modules:
    _replace_vllm()
