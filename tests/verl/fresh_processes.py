"""Processes without verl and Megatron imported yet; ``tests/rank_server.py`` starts them.

What both import from elsewhere takes the seconds, and is imported once, in the server.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from ..rank_server import Launch, look_ahead

IMPORTED = (
    *("torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.checkpoint"),
    *("torch.distributed.fsdp", "torch.distributed.tensor", "accelerate", "codetiming", "datasets"),
    *("einops", "hydra", "omegaconf", "pandas", "peft", "ray", "tensordict", "torchdata"),
    *("transformers", "transformers.modeling_utils", "triton", "wandb"),
)


def import_them(*but: str) -> None:
    """Import what is neither verl's nor Megatron's.

    Args:
        *but: what is left out.
    """
    for name in IMPORTED:
        if name not in but:
            with contextlib.suppress(ModuleNotFoundError):  # not in every environment
                importlib.import_module(name)


def prepare() -> None:
    """Import it, in the server."""
    import_them()
    look_ahead("verl")


def run(launch: Launch) -> Any:
    """Execute the code that the launch names, and return what it has put into ``found``."""
    names: dict[str, Any] = {}
    exec(launch.case, names)
    return names["found"]
