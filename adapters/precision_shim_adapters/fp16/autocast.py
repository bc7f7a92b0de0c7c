"""Switch a framework's hard-coded autocast from bfloat16 to float16 for a float16 model."""

from __future__ import annotations

from typing import Any

import torch


class _Autocast:
    """A hook that switches the autocast region around a module's forward pass from bf16 to fp16.

    The framework computes the loss in the same region, where torch refuses to combine fp16 tensors
    under an autocast to bf16. So the hook switches the rest of the region, not only the module; the
    ``with`` block that opened the region restores the former state.
    """

    def __init__(self, device: str) -> None:
        self._device = device

    def __call__(self, module: Any, args: Any) -> None:
        if (
            torch.is_autocast_enabled(self._device)
            and torch.get_autocast_dtype(self._device) is torch.bfloat16
        ):
            torch.set_autocast_dtype(self._device, torch.float16)


def autocast_in_fp16(module: torch.nn.Module, device: str) -> None:
    """Switch every bfloat16 autocast region in which a module runs to float16.

    Args:
        module: the model that the framework calls.
        device: the type of its device.
    """
    module.register_forward_pre_hook(_Autocast(device))
