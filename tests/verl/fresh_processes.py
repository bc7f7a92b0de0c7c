"""Processes that have not imported verl and Megatron; ``processes/rank_server.py`` starts them.

The server imports the dependencies of verl and Megatron once, because those imports are slow.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from ..processes.rank_server import Launch, look_ahead

IMPORTED = (
    *("torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.checkpoint"),
    *("torch.distributed.fsdp", "torch.distributed.tensor", "accelerate", "codetiming", "datasets"),
    *("einops", "hydra", "omegaconf", "pandas", "peft", "ray", "tensordict", "torchdata"),
    *("transformers", "transformers.modeling_utils", "triton", "wandb"),
)


def import_them(*but: str) -> None:
    """Import the dependencies of verl and Megatron.

    Args:
        *but: names that are not imported.
    """
    for name in IMPORTED:
        if name not in but:
            with contextlib.suppress(ModuleNotFoundError):  # not every environment has all
                importlib.import_module(name)


def prepare() -> None:
    """Import the dependencies of verl and Megatron in the server."""
    import_them()
    look_ahead("verl")


def run(launch: Launch) -> Any:
    """Execute the code in ``launch.case``; returns its variable ``found``."""
    names: dict[str, Any] = {}
    exec(launch.case, names)
    return names["found"]
