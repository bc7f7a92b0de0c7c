"""Drivers of Ray clusters, forked from a process with the slowest imports, but not the shim.

``tests/processes/rank_server.py`` starts the drivers.
"""

from __future__ import annotations

import contextlib
import importlib

from ..processes.forks import script
from ..processes.rank_server import Launch
from .fresh_processes import import_them


def prepare() -> None:
    """Import the dependencies of verl and Megatron in the server."""
    import_them("ray")  # Ray workers die if they are forks of a process with ray.
    with contextlib.suppress(ModuleNotFoundError):  # Automodel's engine needs it.
        importlib.import_module("nemo_automodel._transformers.auto_model")


def run(launch: Launch) -> None:
    """Run the script that the launch names."""
    script(launch)
