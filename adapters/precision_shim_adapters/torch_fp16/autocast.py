"""Switch a framework's hard-coded autocast from bfloat16 to float16 for a float16 model."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch


def _switch_to_fp16(device: str, module: Any, args: Any) -> None:
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.bfloat16:
        torch.set_autocast_dtype(device, torch.float16)


def autocast_in_fp16(module: torch.nn.Module, device: str) -> None:
    """Switch bfloat16 autocast regions to float16 when a module's forward pass runs in them.

    The framework also computes the loss in the autocast region, and torch refuses to combine fp16
    tensors under a bf16 autocast. The switch lasts until the framework's ``with`` block ends.
    ``device`` is the type of the model's device.
    """
    module.register_forward_pre_hook(partial(_switch_to_fp16, device))
