"""The rank processes of the SkyRL tests; ``tests/processes/rank_server.py`` starts them.

``tests/processes/forks.py`` explains the cases.
"""

from __future__ import annotations

import importlib

from ..processes.forks import module, script, tests

__all__ = ["module", "prepare", "script", "tests"]

IMPORTED = (
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torchvision"),
    *("transformers.trainer", "transformers.modeling_layers", "transformers.video_utils"),
    *("accelerate", "aiohttp", "datasets", "pandas", "peft", "scipy.optimize", "scipy.stats"),
)
"""The slowest imports of SkyRL's workers. SkyRL, Megatron and Ray are not in the list, because the
shim must be installed before their import."""


def prepare() -> None:
    """Import ``IMPORTED`` in the server."""
    for name in IMPORTED:
        importlib.import_module(name)
