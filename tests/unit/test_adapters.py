"""The adapters' lists of seams."""

from __future__ import annotations

import pytest

from ..processes.commands import python

ADAPTERS = ("verl", "skyrl", "nemo_rl", "torchtitan", "areal", "ms_swift")

NO_LOOK = """
import importlib, sys
import precision_shim.seams._source as source
import precision_shim.process.session, precision_shim.adapting

def refuse(*args, **kwargs):
    raise AssertionError("looked while the adapter was imported")

for module in list(sys.modules.values()):
    if getattr(module, "__name__", "").startswith("precision_shim"):
        for name in ("look", "find_spec"):
            if getattr(module, name, None) is getattr(source, name):
                setattr(module, name, refuse)

for name in sys.argv[1:]:
    print(name, len(importlib.import_module(f"precision_shim_adapters.{name}.adapter").SEAMS))
"""


def test_an_adapters_list_is_the_same_on_every_machine():
    """An adapter's seams are only declarations: importing the adapter inspects nothing."""
    pytest.importorskip("torch")
    pytest.importorskip("wrapt")
    done = python("-W", "ignore", "-c", NO_LOOK, *ADAPTERS)
    assert done.returncode == 0, done.stderr
    listed = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, _ in listed] == list(ADAPTERS)
    assert all(int(count) > 20 for _, count in listed)
