"""The adapters' lists of seams."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

FRAMEWORKS = (
    *("verl", "skyrl", "nemo_rl", "nemo_automodel", "torchtitan"),
    *("megatron", "ray", "monarch"),
)

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

HIDDEN = sys.argv[2:]

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Hide())
for seam in importlib.import_module(sys.argv[1]).SEAMS:
    print(seam.target, seam.feature, seam.group, seam.relies_on, seam.only_if, seam.unless)
"""


@pytest.mark.parametrize("name", ["verl", "skyrl", "nemo_rl", "torchtitan", "areal", "ms_swift"])
def test_an_adapters_list_is_the_same_on_every_machine(name):
    """An adapter's seams are only declarations: importing the adapter inspects nothing."""
    pytest.importorskip("torch")
    pytest.importorskip("wrapt")

    adapter = f"precision_shim_adapters.{name}"

    def listed(*hidden):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", NO_LOOK, adapter, *hidden],
            env=dict(os.environ),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    here = listed()
    assert len(here) > 20
    assert here == listed(*FRAMEWORKS)
