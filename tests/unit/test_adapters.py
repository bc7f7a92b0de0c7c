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

HIDDEN = sys.argv[2:]

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Hide())
for name in sys.argv[1].split(","):
    for seam in importlib.import_module(f"precision_shim_adapters.{name}.adapter").SEAMS:
        told = (seam.target, seam.feature, seam.group, seam.relies_on, seam.only_if, seam.unless)
        print(name, *told)
"""


def test_an_adapters_list_is_the_same_on_every_machine():
    """An adapter's seams are only declarations: importing the adapter inspects nothing."""
    pytest.importorskip("torch")
    pytest.importorskip("wrapt")

    def listed(*hidden):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", NO_LOOK, ",".join(ADAPTERS), *hidden],
            env=dict(os.environ),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    here = listed()
    for name in ADAPTERS:
        assert sum(line.startswith(f"{name} ") for line in here) > 20
    assert here == listed(*FRAMEWORKS)
