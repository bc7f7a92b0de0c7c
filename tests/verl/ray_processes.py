"""Drivers of Ray clusters, forked with the imports that take longest; no shim is among them.

``tests/rank_server.py`` starts them.
"""

from __future__ import annotations

import contextlib
import importlib

from ..forks import script
from ..rank_server import Launch
from .fresh_processes import IMPORTED


def prepare() -> None:
    """Import what is neither verl's nor Megatron's, in the server."""
    for name in set(IMPORTED) - {"ray"}:  # which takes note of the process that imports it
        with contextlib.suppress(ModuleNotFoundError):  # not in every environment
            importlib.import_module(name)


def run(launch: Launch) -> None:
    """Run the script that the launch names."""
    script(launch)
