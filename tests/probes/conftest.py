"""Imports the installed framework, with stand-ins for what a CPU lacks.

These tests make and leave a process group. On pytest's command line they come before the tests of
a framework, which keep a process group to the end.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..stand_ins.megatron_bridge import import_megatron_bridge

FRAMEWORKS = ("verl", "skyrl", "nemo_rl", "torchtitan")


def is_there(module: str) -> bool:
    """Whether a module is installed."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


collect_ignore = [f"test_{name}.py" for name in FRAMEWORKS if not is_there(name)]
if not is_there("megatron.core"):
    collect_ignore.append("test_megatron.py")


def import_frameworks() -> None:
    """Import what needs stand-ins on a CPU."""
    if is_there("skyrl"):
        from ..skyrl.cpu import flash_attn_placeholder, import_megatron

        if not is_there("flash_attn"):
            folder = Path(tempfile.mkdtemp(prefix="flash_attn"))
            sys.path.insert(0, str(flash_attn_placeholder(folder)))
        import_megatron()
    elif is_there("torchtitan"):
        from ..torchtitan.cpu import answer_for_gpus

        answer_for_gpus()
    elif is_there("megatron.bridge"):
        import_megatron_bridge()


@pytest.fixture(scope="session", autouse=True)
def frameworks() -> None:
    """Import the installed framework once."""
    import_frameworks()


@pytest.fixture(autouse=True)
def no_rerun_state() -> Iterator[None]:
    """Destroy Megatron's rerun state machine: a framework's own start expects none."""
    yield
    module = sys.modules.get("megatron.core.rerun_state_machine")
    if module is not None:
        module.destroy_rerun_state_machine()
