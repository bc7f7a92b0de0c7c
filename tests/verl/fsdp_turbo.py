"""A stand-in for four modules of FSDP Turbo, which verl imports and no package index has.

``install()`` puts the modules into ``sys.modules``. FSDP2's ``fully_shard``, with the dtypes
of ``turbo_config``, replaces Turbo's own sharding, and torch's gradient clipping replaces Turbo's.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any


class FSDPTurboConfig:
    """Stands in for Turbo's config, a tree of attributes."""


def _dict_to_dataclass(kind: type, values: Any) -> Any:
    def tree(found: Any) -> Any:
        if not hasattr(found, "items"):
            return found
        return SimpleNamespace(**{key: tree(value) for key, value in found.items()})

    return tree(values)


class _ParallelState:
    """One parallel dimension: all ranks are data parallel."""

    def is_group_enable(self, name: str) -> bool:
        return False

    def get_data_rank(self) -> int:
        import torch.distributed as dist

        return dist.get_rank()

    def get_data_group_size(self) -> int:
        import torch.distributed as dist

        return dist.get_world_size()

    def get_data_group(self) -> Any:
        import torch.distributed as dist

        return dist.group.WORLD


def init_parallel_state(config: Any) -> None:
    """Does nothing: ``get_parallel_state`` needs no setup."""


def get_parallel_state() -> Any:
    return _ParallelState()


class FSDPTurbo:
    """Shards a model; the attribute ``model`` is the sharded model."""

    def __init__(self, config: Any, model: Any) -> None:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        plan = config.distributed.fsdp_plan
        policy = MixedPrecisionPolicy(
            param_dtype=getattr(torch, plan.param_dtype.removeprefix("torch.")),
            reduce_dtype=torch.float32,
        )
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        self.model = fully_shard(model, mesh=mesh, mp_policy=policy)


def clip_grad_norm(*, model: Any, max_norm: float) -> float:
    import torch

    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return float((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item())


def install() -> None:
    """Put the stand-in modules into ``sys.modules``."""
    names: dict[str, dict[str, Any]] = {
        "fsdp_turbo": {},
        "fsdp_turbo.distributed": {},
        "fsdp_turbo.training": {},
        "fsdp_turbo.distributed.parallel_state": {
            "get_parallel_state": get_parallel_state,
            "init_parallel_state": init_parallel_state,
        },
        "fsdp_turbo.fsdp_turbo_config": {
            "FSDPTurboConfig": FSDPTurboConfig,
            "_dict_to_dataclass": _dict_to_dataclass,
        },
        "fsdp_turbo.fsdp_turbo": {"FSDPTurbo": FSDPTurbo},
        "fsdp_turbo.training.clip_grads": {"clip_grad_norm": clip_grad_norm},
    }
    for name, members in names.items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(members)
        sys.modules[name] = module
