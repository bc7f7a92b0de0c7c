"""Drivers of Ray clusters, forked with the imports that take longest; no shim is among them.

``tests/rank_server.py`` starts them.
"""

from __future__ import annotations

import contextlib
import importlib

from ..forks import script
from ..rank_server import Launch
from .fresh_processes import import_them


def prepare() -> None:
    """Import what is neither verl's nor Megatron's, in the server."""
    import_them("ray")  # a worker of Ray's ends at its start in a fork of what has imported it
    with contextlib.suppress(ModuleNotFoundError):  # verl's Automodel engine stands on it
        importlib.import_module("nemo_automodel._transformers.auto_model")


def run(launch: Launch) -> None:
    """Run the script that the launch names."""
    script(launch)
