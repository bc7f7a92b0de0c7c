"""Make Megatron's GPT models compute their output layer, the LM head, in fp32."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import torch

from precision_shim.errors import UnsupportedPrecisionError
from precision_shim.precision.lm_head import HEAD_MARK

_LAYER = "output_layer"


def compute_in_fp32(chunks: Iterable[torch.nn.Module], where: str, setting: str) -> None:
    """Make model chunks compute their output layer in fp32; the weight's dtype does not change.

    Only the last pipeline stage's chunks have one. ``where`` (framework and version) and
    ``setting``, such as ``"PRECISION_SHIM_HEAD=fp32"``, are for messages.

    Raises:
        UnsupportedPrecisionError: the layer is not one that the shim can compute in fp32.
    """
    from megatron.core.tensor_parallel import ColumnParallelLinear

    for chunk in chunks:
        for name, module in chunk.named_modules():
            if name.rpartition(".")[2] != _LAYER:
                continue
            config: Any = getattr(module, "config", None)
            found = type(module).__name__
            if getattr(config, "defer_embedding_wgrad_compute", False):
                found += " with defer_embedding_wgrad_compute"
            if not isinstance(module, ColumnParallelLinear) or " " in found:
                raise UnsupportedPrecisionError(
                    f"{where}: {setting}: {name} is a {found}; allowed: Megatron's "
                    "ColumnParallelLinear, whose weight gradient is not deferred. Unset "
                    "PRECISION_SHIM_HEAD."
                )
            # Megatron's fused kernel adds to ``main_grad``; a weight's fp32 copy has no main_grad.
            module.gradient_accumulation_fusion = False
            module.forward = types.MethodType(_forward, module)
            setattr(module, HEAD_MARK, "fp32")


def _forward(
    layer: Any, input_: torch.Tensor, weight: torch.Tensor | None = None, *args: Any, **kwargs: Any
) -> Any:
    weight = layer.weight if weight is None else weight
    wide = None if weight is None else weight.float()
    return type(layer).forward(layer, input_.float(), wide, *args, **kwargs)
