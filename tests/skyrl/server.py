"""The processes of the SkyRL tests; ``tests/rank_server.py`` starts them.

The cases are those of ``tests/forks.py``.
"""

from __future__ import annotations

import importlib
from typing import Any

from .. import forks
from ..rank_server import Launch

IMPORTED = (
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torchvision"),
    *("transformers.trainer", "transformers.modeling_layers", "transformers.video_utils"),
    *("accelerate", "aiohttp", "datasets", "pandas", "peft", "scipy.optimize", "scipy.stats"),
)
"""What takes longest of what SkyRL's workers import. SkyRL, Megatron and Ray are left to each
process: the shim is to be there before them."""


def prepare() -> None:
    """Import what is not SkyRL's own, in the server."""
    for name in IMPORTED:
        importlib.import_module(name)


def run(launch: Launch) -> Any:
    """Run the case of a launch."""
    return {"script": forks.script, "tests": forks.tests}[launch.case](launch)
