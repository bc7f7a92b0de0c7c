"""Tools for testing precision without a GPU: for this project, its contributors and users.

Real frameworks, real Megatron-core, real optimizers' arithmetic; only what needs a GPU is
replaced, and each replacement says in its docstring what it stands for and what it does
not. A test that passes here has run the framework's own code; it has not run a CUDA kernel.

A tiny GPT under Megatron's own DDP and DistributedOptimizer, with the precision-aware
optimizer, on any laptop with torch and megatron-core::

    from precision_shim.testing import (
        measure_bytes, megatron_on_cpu, model_parallel, stand_in_transformer_engine, tiny_gpt,
    )

    with stand_in_transformer_engine(), megatron_on_cpu(), model_parallel():
        provider = tiny_gpt(torch.bfloat16)
        chunks = verl_get_model(provider, transformer_config=provider.config)
        optimizer = get_megatron_optimizer(optimizer_config, chunks)
        ...                                       # forward, backward, optimizer.step()
        print(measure_bytes(chunks, optimizer))   # bytes per parameter, from live tensors

Enter the three in this order. Each undoes itself; what was built inside keeps working as
plain torch objects but can be trained only inside :func:`megatron_on_cpu`.

* :func:`stand_in_transformer_engine` lets Megatron find a ``FusedAdam`` of any
  TransformerEngine version from 1.13 on, to test what is legal where.
* :class:`FusedAdam` is that class; it works as a plain optimizer as well.
* :func:`split_master` and :func:`join_master` convert between fp32 masters and bf16
  parameters with int16 remainders, bit for bit.
* :func:`megatron_on_cpu`, :func:`cuda_means_cpu`, :func:`model_parallel`,
  :func:`tiny_gpt`: the harness.
* :func:`measure_bytes`: what is really allocated.

Importing this package imports neither torch nor Megatron; the names below load what they
need when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .fused_adam import FusedAdam, FusedSGD, fused_adam_for, join_master, split_master
    from .measure import MeasuredBytes, Part, measure_bytes
    from .megatron_cpu import cuda_means_cpu, megatron_on_cpu, model_parallel, tiny_gpt
    from .transformer_engine import (
        StandIn,
        real_transformer_engine,
        stand_in_transformer_engine,
    )

__all__ = [
    "FusedAdam",
    "FusedSGD",
    "MeasuredBytes",
    "Part",
    "StandIn",
    "cuda_means_cpu",
    "fused_adam_for",
    "join_master",
    "measure_bytes",
    "megatron_on_cpu",
    "model_parallel",
    "real_transformer_engine",
    "split_master",
    "stand_in_transformer_engine",
    "tiny_gpt",
]

_HOMES = {
    "FusedAdam": "fused_adam",
    "FusedSGD": "fused_adam",
    "fused_adam_for": "fused_adam",
    "join_master": "fused_adam",
    "split_master": "fused_adam",
    "MeasuredBytes": "measure",
    "Part": "measure",
    "measure_bytes": "measure",
    "cuda_means_cpu": "megatron_cpu",
    "megatron_on_cpu": "megatron_cpu",
    "model_parallel": "megatron_cpu",
    "tiny_gpt": "megatron_cpu",
    "StandIn": "transformer_engine",
    "real_transformer_engine": "transformer_engine",
    "stand_in_transformer_engine": "transformer_engine",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
