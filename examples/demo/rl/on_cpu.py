"""Lets verl 0.9.1 train on a CPU: the import of this module patches torch and verl.

Through ``VERL_USE_EXTERNAL_MODULES`` each of verl's processes imports this module. Only
:func:`log_softmax_in_fp32` changes the trainer's results.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from ...processes import ports


def log_softmax_in_fp32() -> None:
    """Make a CPU's autocast compute ``log_softmax`` in fp32, as CUDA's autocast does.

    Unpatched, a CPU's autocast computes ``log_softmax`` in 16 bits. This rounding, which no GPU's
    trainer has, would cause most of the mismatch of an fp16 trainer and an fp16 rollout.
    """
    import torch

    original = torch.nn.functional.log_softmax

    def log_softmax(input: Any, *given: Any, **named: Any) -> Any:
        exact = input.float() if torch.is_autocast_enabled("cpu") else input
        return original(exact, *given, **named)

    torch.nn.functional.log_softmax = log_softmax


def complete_torch_cpu() -> None:
    """Add to ``torch.cpu`` the functions of ``torch.cuda`` that verl calls."""
    import torch

    nothing = {
        "empty_cache": None, "ipc_collect": None, "reset_peak_memory_stats": None,
        "max_memory_allocated": 0, "max_memory_reserved": 0,
        "memory_allocated": 0, "memory_reserved": 0, "mem_get_info": (1, 1),
        "get_device_name": "CPU",
    }  # fmt: skip
    for name, value in nothing.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, lambda *_, _value=value, **__: _value)
    for name in ("get_rng_state", "set_rng_state"):
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, getattr(torch, name))


def one_gloo() -> None:
    """Replace verl's backend ``cpu:gloo,cpu:gloo``, which torch refuses, by ``gloo``."""
    import torch.distributed as dist

    original = dist.init_process_group

    def init_process_group(backend: str | None = None, *given: Any, **named: Any) -> Any:
        backend = "gloo" if backend == "cpu:gloo,cpu:gloo" else backend
        return original(backend, *given, **named)

    dist.init_process_group = init_process_group


def register_platform() -> None:
    """Register a platform ``cpu`` with verl, through verl's own registry."""
    import torch
    from verl.plugin.platform.platform_base import PlatformBase
    from verl.plugin.platform.platform_manager import PlatformRegistry

    answers: dict[str, Any] = {
        "is_available": True,
        "is_platform_available": True,
        "current_device": "cpu",
        "device_count": 1,
        "get_device_capability": (None, None),
        "communication_backend_name": "gloo",
        "visible_devices_envvar": "CUDA_VISIBLE_DEVICES",
        "ray_resource_name": "GPU",
        "ray_noset_envvars": ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"],
        "is_ipc_supported": False,  # makes verl send weights to vLLM over shared memory
        **dict.fromkeys(
            ("set_device", "synchronize", "set_allocator_settings", "empty_cache", "cudart",
             "profiler_start", "profiler_stop")
        ),
    }  # fmt: skip
    members: dict[str, Any] = {
        name: (lambda self, *_, _value=value, **__: _value) for name, value in answers.items()
    }
    members |= dict.fromkeys(("device_name", "vendor_name"), "cpu")
    members |= {
        "device_module": torch.cpu,
        "manual_seed": lambda self, seed: torch.manual_seed(seed),
        "manual_seed_all": lambda self, seed: torch.manual_seed(seed),
        "nvtx_range": lambda self, message: nullcontext(),
        "ray_resource_options": lambda self, number: {"num_gpus": number},
    }
    PlatformRegistry.register(platform="cpu")(type("PlatformCPU", (PlatformBase,), members))


def ports_that_stay_free() -> None:
    """Make verl choose the port of a trainer's process group among ports that Linux never assigns.

    Otherwise another process may take the port in the seconds before the trainer starts.
    """
    from verl.single_controller.ray.base import RayWorkerGroup

    original = RayWorkerGroup.__init__

    def make(self: Any, *given: Any, **named: Any) -> None:
        original(self, *given, **{"master_port_range": ports.a_range(), **named})

    RayWorkerGroup.__init__ = make


complete_torch_cpu()
one_gloo()
ports_that_stay_free()
log_softmax_in_fp32()
register_platform()
