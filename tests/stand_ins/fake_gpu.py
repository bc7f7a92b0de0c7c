"""Tensors that claim to be on a GPU, although a CPU stores all of them.

Megatron's optimizer for CPU offload copies only what is on the GPU to the host. In a process
without a GPU, Megatron's optimizer would copy nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_KEEP_THE_PLACE = (
    torch.Tensor.clone,
    torch.Tensor.detach,
    torch.Tensor.float,
    torch.Tensor.pin_memory,
    torch.zeros_like,
)

_IS_CUDA = vars(torch._C.TensorBase)["is_cuda"].__get__
_DEVICE = vars(torch._C.TensorBase)["device"].__get__


class FakeGpu(TorchFunctionMode):
    """Answers ``is_cuda``: false for a tensor from ``cpu()`` and its copies, true for all others.

    Enter the mode within ``megatron_on_cpu``, whose streams replace those of a GPU.

    Attributes:
        names_devices: whether ``device`` is answered too; code that checks devices fails on that.
    """

    names_devices = False

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, Any] = {}

    def on_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's storage would be in the host's memory."""
        return tensor.untyped_storage()._cdata in self._storages

    def _put(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage
        return tensor

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func == _IS_CUDA:
            return not self.on_host(args[0])
        if self.names_devices and func == _DEVICE:
            return torch.device("cpu") if self.on_host(args[0]) else _CUDA
        if func is torch.Tensor.cpu:
            return self._put(args[0].clone())
        result = func(*args, **kwargs)
        if func is torch.empty and kwargs.get("device") == "cpu":
            return self._put(result)
        if func in _KEEP_THE_PLACE and self.on_host(args[0]):
            self._put(result)
        return result


_CUDA = torch.device("cuda")
"""The CUDA device, made at import because it does not exist within ``megatron_on_cpu``."""
