"""Conditions for a seam to apply to a version: what must exist, and what must not."""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Iterable

import pytest

from precision_shim.errors import SeamError
from precision_shim.process.framework import Adapter
from precision_shim.seams import check, seam
from precision_shim.seams._source import drop_trees

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
        ("toy.ops:Box.add mentions value", True),  # the method's class counts too, as in relies_on
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


def test_no_syntax_tree_outlives_the_check(lab, monkeypatch):
    monkeypatch.setattr("precision_shim.seams._source._described", {})

    def trees() -> set[int]:
        return {id(one) for one in gc.get_objects() if isinstance(one, ast.Module)}

    drop_trees()
    before = trees()
    assert targets(lab.adapter(lab.seam("toy.ops:scale"))) == ["scale"]
    gc.collect()
    assert trees() <= before


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
