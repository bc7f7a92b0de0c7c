"""What must and what must not be there for a seam to be one of this version's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable

import pytest

from precision_shim.errors import SeamError
from precision_shim.seams import Adapter, check, seam

FEATURES = ("f", "g")


def targets(adapter: Adapter, features: Iterable[str] = FEATURES) -> list[str]:
    return [row.seam.attribute for row in check(adapter, features, None).rows]


@pytest.mark.parametrize(
    ("condition", "there"),
    [
        ("toy.ops", True),
        ("toy.gone", False),
        ("toy_gone.ops", False),
        ("toy.ops:scale", True),
        ("toy.ops:Box.add", True),
        ("toy.ops:Box.gone", False),
        ("toy.gone:scale", False),
        ("toy.ops:scale mentions factor", True),
        ("toy.ops:Box.add mentions value", True),  # a method's class counts, as in relies_on
        ("toy.ops:scale mentions amount", False),
        ("toy.gone:scale mentions factor", False),
    ],
)
def test_it_is_read_from_source_and_imports_nothing(lab, condition, there):
    other = lab.seam("toy.ops:shift")
    needs = lab.adapter(other, lab.seam("toy.ops:scale", only_if=(condition,)))
    avoids = lab.adapter(other, lab.seam("toy.ops:scale", unless=(condition,)))
    assert ("scale" in targets(needs)) is there
    assert ("scale" in targets(avoids)) is not there
    assert "toy" not in sys.modules


def test_all_must_be_there_and_one_is_enough_to_leave_a_seam_out(lab):
    def listed(**conditions):
        return targets(lab.adapter(lab.seam("toy.ops:scale", **conditions))) == ["scale"]

    assert listed(only_if=("toy", "toy.ops:shift"), unless=("toy.gone", "toy.ops:gone"))
    assert not listed(only_if=("toy", "toy.gone"))
    assert not listed(unless=("toy.gone", "toy"))


def test_what_is_not_of_this_version_is_in_no_status_and_refuses_nothing(lab):
    engine = lab.install(
        lab.seam("toy.ops:gone", only_if=("toy.ops:gone",)),
        lab.seam("toy.ops:shift", "toy_wrappers:wants_step", unless=("toy.ops:shift",)),
        lab.seam("toy.ops:scale"),
        lab.seam("toy.gone:scale", feature="off", only_if=("toy.gone",)),
    )
    assert [seam.target for seam in engine.report("toy")] == ["toy.ops:scale"]
    assert lab.ops.scale(3) == -6
    assert lab.ops.shift(3) == 4
    assert lab.states(engine) == ["wrapped"]
    assert lab.faults == []


def test_of_two_places_the_one_that_is_there_is_patched(lab):
    old, new = "toy.ops:scale", "toy.workers.ops:scale"
    seams = (lab.seam(old, only_if=("toy.ops",)), lab.seam(new, unless=("toy.ops",)))
    assert [one.target for one in lab.install(*seams).report("toy")] == [old]
    assert lab.ops.scale(3) == -6


@pytest.mark.parametrize("text", ["", "toy ops", "toy.ops:", ":scale", "toy:a:b", "toy mentions a"])
@pytest.mark.parametrize("field", ["only_if", "unless"])
def test_another_form_is_an_error_that_names_the_function(field, text):
    def wrapper(call):
        return call.proceed()

    with pytest.raises(SeamError, match=r"wrapper: .* is no condition; allowed .*mentions") as told:
        seam("toy.ops:scale", "f", why="a test", **{field: (text,)})(wrapper)
    assert repr(text) in str(told.value)


NO_LOOK = """
import importlib, sys
import precision_shim.seams._source as source
import precision_shim._session, precision_shim.adapting

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
for seam in importlib.import_module(sys.argv[1]).ADAPTER.seams:
    print(seam.target, seam.feature, seam.group, seam.relies_on, seam.only_if, seam.unless)
"""


@pytest.mark.parametrize("name", ["verl", "skyrl", "nemo_rl"])
def test_an_adapters_list_is_the_same_on_every_machine(name):
    """It is a list of what was written down: its import looks at nothing."""
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
    assert here == listed("nemo_rl", "nemo_automodel", "verl", "skyrl", "megatron", "ray")
