"""Rounds each weight to bf16 on its way from verl's trainer to the rollout engine.

verl itself rounded weights to bf16 up to 0.8.0. Through ``VERL_USE_EXTERNAL_MODULES`` each of
verl's processes imports this module, which first imports the demo's stand-ins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import wrapt
from examples.demo.rl import on_cpu  # noqa: F401  # the stand-ins for a GPU


def _round(weights: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, weight in weights:
        yield name, weight.to(torch.bfloat16).to(weight.dtype)


def _through_bf16(module: Any) -> None:
    def sent(wrapped: Any, _: Any, given: Any, named: Any) -> Any:
        weights, adapters = wrapped(*given, **named)
        return _round(weights), adapters

    wrapt.wrap_function_wrapper(module, "FSDPEngine.get_per_tensor_param", sent)


wrapt.register_post_import_hook(_through_bf16, "verl.workers.engine.fsdp.transformer_impl")
