"""A seam whose function makes the replacement of a symbol."""

from __future__ import annotations

import sys

import pytest

MAKERS = {
    "toy_makers.py": """
MADE = []


def bigger(original):
    made = type(original.__name__, (original,), {"add": lambda self, amount: -amount})
    MADE.append(made)
    return made


def unable(original):
    raise ValueError("made of the wrong stuff")
""",
    "toy/holders.py": "from toy.ops import Box\n",
}
BOX = "toy.ops:Box"


@pytest.fixture
def seam(lab):
    lab.write(MAKERS)
    return lambda **fields: lab.seam(BOX, "toy_makers:bigger", replaces=True, **fields)


def test_puts_what_the_function_makes_in_the_symbols_place(lab, seam):
    engine = lab.install(seam())
    box = lab.ops.Box(5)
    assert box.add(1) == -1
    assert lab.ops.Box is lab.load("toy_makers").MADE[0]
    assert lab.states(engine) == ["wrapped"]


def test_uninstall_brings_the_very_object_back_also_where_modules_hold_it(lab, seam):
    ops, holders = lab.ops, lab.load("toy.holders")
    before = {**vars(ops)}
    engine = lab.install(seam(aliases=("toy.holders:Box",)))
    assert holders.Box is ops.Box is not before["Box"]
    lab.write({"toy/late.py": "from toy.ops import Box\n"})
    late = lab.load("toy.late")
    assert late.Box is ops.Box
    assert engine.remove() == []
    assert {**vars(ops)} == before
    assert ops.Box is holders.Box is late.Box is before["Box"]


def test_two_features_share_one_replacement(lab, seam):
    lab.install(seam(feature="f"), seam(feature="g"))
    assert lab.ops.Box(1).add(1) == -1
    assert len(lab.load("toy_makers").MADE) == 1


def test_a_function_that_fails_refuses_the_group_whole(lab, seam):
    ops = lab.ops
    original = ops.Box
    engine = lab.install(
        lab.seam("toy.ops:scale"), lab.seam(BOX, "toy_makers:unable", replaces=True)
    )
    assert ops.Box is original
    assert ops.scale(3) == 6
    assert lab.states(engine) == ["refused", "refused"]
    assert "made of the wrong stuff" in lab.faults[0][1]


def test_a_refused_group_takes_its_replacement_back(lab, seam):
    ops = lab.ops
    original = ops.Box
    lab.install(seam(), lab.seam("toy.users:use", "toy_makers:unable", replaces=True))
    assert ops.Box is not original
    lab.load("toy.users")
    assert ops.Box is original


def test_a_module_that_runs_again_is_replaced_again(lab, seam):
    import importlib

    lab.install(seam())
    first = lab.ops.Box
    again = importlib.reload(lab.ops).Box
    assert again is not first
    assert again(1).add(1) == -1


def test_another_tools_class_over_ours_is_left_alone(lab, seam):
    ops = lab.ops
    engine = lab.install(seam())
    theirs = type("Theirs", (ops.Box,), {})
    ops.Box = theirs
    assert "changed by someone else" in engine.remove()[0]
    assert ops.Box is theirs
    assert "toy_makers" in sys.modules


def test_what_is_replaced_need_not_be_callable(lab):
    lab.write(
        {
            "toy/endpoints.py": """
class Endpoint:
    def __init__(self, method):
        self.method = method


class Actor:
    @Endpoint
    def step(self):
        return 1
""",
            "toy_makers.py": "def again(found):\n    return type(found)(lambda self: 2)\n",
        }
    )
    actor = lab.load("toy.endpoints").Actor
    before = actor.step
    engine = lab.install(lab.seam("toy.endpoints:Actor.step", "toy_makers:again", replaces=True))
    assert lab.states(engine) == ["wrapped"]
    assert actor.step.method(None) == 2
    engine.remove()
    assert actor.step is before
