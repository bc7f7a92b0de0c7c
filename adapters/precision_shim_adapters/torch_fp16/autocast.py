"""Switch a framework's hard-coded autocast from bfloat16 to float16 for a float16 model."""

from __future__ import annotations

from typing import Any

import torch


class _Autocast:
    """A hook that switches the autocast region around a module's forward pass from bf16 to fp16.

    The framework also computes the loss in the forward pass's autocast region, and torch refuses to
    combine fp16 tensors under a bf16 autocast. The switch to fp16 lasts until the autocast region
    ends; then the framework's ``with`` block restores the former autocast dtype.
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
    """Switch bfloat16 autocast regions to float16 when a module runs in them.

    Args:
        module: the model that the framework calls.
        device: the type of the model's device.
    """
    module.register_forward_pre_hook(_Autocast(device))
