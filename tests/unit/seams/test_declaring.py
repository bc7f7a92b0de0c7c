"""A seam is declared on its function; an invalid one is an error when the adapter loads."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types

import pytest

from precision_shim.errors import SeamError
from precision_shim.process.framework import Adapter
from precision_shim.process.registry import load
from precision_shim.seams import Seam, collect, seam


def native(symbol, settings):
    return None


def test_the_function_stays_what_it_is_and_its_parameters_are_the_symbols():
    def wrapper(call, value, by=1):
        return call.proceed()

    marked = seam("toy.ops:shift", "f", why="a test", group="g", relies_on=("value",))(wrapper)
    (record,) = collect(marked)
    assert marked is wrapper is record.wrapper
    assert (record.target, record.feature, record.group) == ("toy.ops:shift", "f", "g")
    assert record.parameters == ("value",)
    assert set(record.reads) == {"value", "by"}
    assert (record.module, record.attribute) == ("toy.ops", "shift")


def test_several_features_and_several_places_are_records_of_their_own_in_reading_order():
    @seam("toy.ops:scale", ("f", "g"), why="a test")
    @seam("toy.ops:shift", "f", why="a test")
    def wrapper(call):
        return call.proceed()

    found = [(one.target, one.feature) for one in collect(wrapper)]
    assert found == [("toy.ops:scale", "f"), ("toy.ops:scale", "g"), ("toy.ops:shift", "f")]


def test_places_of_one_declaration_are_records_in_their_order_each_with_what_is_said_of_it():
    shift = {"target": "toy.ops:shift", "group": "two", "feature": ("f", "g"), "why": "its own"}

    @seam(feature="f", at=("toy.ops:scale", shift), why="a test", group="one", optional=True)
    @seam("toy.ops:last", "f", at=[{"group": "three"}, {"group": "four"}], why="a test")
    def wrapper(call):
        return call.proceed()

    found = [
        (one.target, one.feature, one.group, one.why, one.optional) for one in collect(wrapper)
    ]
    assert found == [
        ("toy.ops:scale", "f", "one", "a test", True),
        ("toy.ops:shift", "f", "two", "its own", True),
        ("toy.ops:shift", "g", "two", "its own", True),
        ("toy.ops:last", "f", "three", "a test", False),
        ("toy.ops:last", "f", "four", "a test", False),
    ]


def test_help_shows_all_that_a_declaration_takes():
    takes = list(inspect.signature(seam).parameters)
    assert takes[:3] == ["target", "feature", "why"]
    record = {one.name for one in dataclasses.fields(Seam)}
    assert {*takes} == record - {"wrapper"} | {"at"}


def test_a_module_is_collected_in_the_order_of_its_definitions_without_what_it_imported():
    other, module = types.ModuleType("other"), types.ModuleType("module")
    code = (
        "def {0}(call):\n    return call.proceed()\n{0} = seam('toy.ops:scale', 'f', why='w')({0})"
    )
    for made, names in ((other, "c"), (module, "ba")):
        vars(made)["seam"] = seam
        for name in names:
            exec(code.format(name), vars(made))
    module.imported = other.c
    assert [one.wrapper.__name__ for one in collect(module, other.c)] == ["b", "a", "c"]


def test_a_record_stands_for_itself_and_lists_are_taken_apart():
    one = Seam("toy.ops:scale", "f", None, why="a test", native=native)
    assert collect(one, [one, (one,)]) == (one, one, one)


def here(call):
    return call.proceed()


def no_call():
    pass


def takes_all(call, *args, **kwargs):
    pass


@pytest.mark.parametrize(
    ("function", "fields", "says"),
    [
        (here, {"target": "toy.ops.scale"}, "'toy.ops.scale' is no place; allowed: 'module:attr"),
        (here, {"target": "toy.ops:"}, "'toy.ops:' is no place"),
        (here, {"aliases": ("toy.users.scale",)}, "'toy.users.scale' is no place"),
        (here, {"optionl": True}, "has no 'optionl'; allowed: target, feature, why, upstream"),
        (here, {"at": [{"optionl": True}]}, "has no 'optionl'; allowed: target, feature, why"),
        (here, {"at": [{"at": ["toy.ops:shift"]}]}, "has no 'at'"),
        (here, {"at": ["toy.ops.shift"]}, "'toy.ops.shift' is no place"),
        (here, {"target": "", "at": []}, "'' is no place"),
        (here, {"feature": (), "why": ""}, r"seam\(...\) needs feature and why"),
        (here, {"at": [{"why": ""}]}, r"seam\(...\) needs why"),
        (here, {"native": "toy:probe"}, "'toy:probe' is no function"),
        (no_call, {}, "first the call, then parameters of the symbol"),
        (takes_all, {}, r"no \*args and no \*\*kwargs"),
    ],
)
def test_what_makes_no_sense_is_an_error_that_names_the_function(function, fields, says):
    values = {"target": "toy.ops:scale", "feature": "f", "why": "a test", **fields}
    with pytest.raises(SeamError, match=says) as caught:
        seam(**values)(function)
    named = "toy.ops:scale" if "native" in fields else f"{__name__}:{function.__name__}"
    assert named in str(caught.value)


def test_a_misspelt_feature_is_an_error_when_the_adapter_is_loaded():
    table = (Seam("toy.ops:scale", "fp61", here, why="a test"),)
    adapter = Adapter("toy", "toy", ("toy",), ("1.0",), table)
    says = f"toy: {__name__}:here is declared for the feature 'fp61'; allowed: dtype-coercion, bf16"
    with pytest.raises(SeamError, match=re.escape(says)):
        load(adapter)
    right = (Seam("toy.ops:scale", "fp16-scaling", here, why="a test"),)
    assert load(adapter.replace(seams=right)).seams is right


def test_a_record_without_wrapper_needs_a_probe():
    with pytest.raises(SeamError, match="needs a native= probe"):
        Seam("toy.ops:scale", "f", None, why="a test")


def test_what_declares_nothing_is_an_error():
    with pytest.raises(SeamError, match=r"here declares no seam"):
        collect(here)
    with pytest.raises(SeamError, match=r"empty declares no seam"):
        collect(types.ModuleType("empty"))
