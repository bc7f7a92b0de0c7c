"""Drivers of Ray clusters and other new Pythons: forks of a process with the slowest imports.

``tests/processes/rank_server.py`` starts them. They start the shim themselves.
"""

from __future__ import annotations

import contextlib
import importlib

from ..processes.forks import module, script, tests

__all__ = ["module", "prepare", "script", "tests"]

IMPORTED = (
    *("torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.checkpoint"),
    *("torch.distributed.fsdp", "torch.distributed.tensor", "accelerate", "codetiming", "datasets"),
    *("einops", "hydra", "omegaconf", "pandas", "peft", "tensordict", "torchdata", "transformers"),
    *("transformers.modeling_utils", "triton", "wandb", "nemo_automodel._transformers.auto_model"),
)
"""Without ray: Ray's workers die if they are forks of a process with ray."""


def prepare() -> None:
    """Import the dependencies of verl, of Megatron and of Automodel's engine in the server."""
    for name in IMPORTED:
        with contextlib.suppress(ModuleNotFoundError):  # not every environment has all
            importlib.import_module(name)
