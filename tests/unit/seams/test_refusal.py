"""A group whose facts do not hold is refused as a whole before any patch, and reported."""

from __future__ import annotations

import sys

import pytest

from precision_shim.seams import check

GOOD = "toy.ops:scale"
OTHER = "toy.ops:shift"


def untouched(lab):
    return {type(getattr(lab.ops, name)).__name__ for name in ("scale", "shift")} == {"function"}


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"target": "toy.ops:gone"}, "toy.ops:gone"),
        ({"target": "toy.ops:Box.gone"}, "toy.ops:Box.gone"),
        ({"target": "toy.ops:LIMIT"}, "toy.ops:LIMIT"),
        ({"target": "toy.gone:scale"}, "toy.gone"),
        ({"target": OTHER, "wrapper": "toy_wrappers:wants_step"}, "'step'"),
        ({"target": OTHER, "relies_on": ("value", "use_mcore")}, "'use_mcore'"),
    ],
    ids=["function", "method", "assignment", "module", "parameter", "relied-on name"],
)
def test_a_lack_refuses_the_whole_group(lab, bad, said):
    ops = lab.ops
    engine = lab.install(lab.seam(GOOD), lab.seam(**bad))
    assert untouched(lab)
    assert lab.states(engine) == ["refused", "refused"]
    (framework, message), *others = lab.faults
    assert others == []
    assert framework == "toy"
    for part in ("toy 1.0", "f", said, "1.0", "PRECISION_SHIM_FEATURES=-f"):
        assert part in message
    assert said in engine.report("toy")[1].reason
    assert said in engine.report("toy")[0].reason
    assert ops.scale(3) == 6


KINDS = """
import contextlib
import functools


class Box:
    @property
    def is_property(self, value=1):
        return value

    @functools.cached_property
    def is_cached(self):
        return 1

    @staticmethod
    def is_static(value):
        return value

    @classmethod
    def is_of_class(cls, value):
        return value


async def is_coroutine(value):
    return value


def is_generator(value):
    yield value


@contextlib.contextmanager
def is_context(value):
    yield value


class is_class:
    pass


def holds_a_generator(value):
    def inner():
        yield value

    return list(inner())
"""


@pytest.mark.parametrize(
    ("name", "wrapper", "kind"),
    [
        ("Box.is_property", "negate", "property"),
        ("Box.is_cached", "negate", "property"),
        ("Box.is_static", "note", "staticmethod"),
        ("Box.is_static", "negate", ""),
        ("Box.is_of_class", "note", "classmethod"),
        ("Box.is_of_class", "negate", ""),
        ("is_coroutine", "negate", "coroutine"),
        ("is_generator", "negate", "generator"),
        ("is_context", "negate", "context manager"),
        ("is_class", "negate", "class"),
        ("holds_a_generator", "negate", ""),
        ("is_coroutine", "awaits", ""),
        ("is_generator", "yields", ""),
        ("holds_a_generator", "awaits", "plain function"),
        ("holds_a_generator", "yields", "plain function"),
    ],
)
def test_what_a_wrapper_cannot_stand_at_is_refused_from_source(lab, name, wrapper, kind):
    lab.write({"toy/kinds.py": KINDS})
    adapter = lab.adapter(lab.seam(f"toy.kinds:{name}", f"toy_wrappers:{wrapper}"))
    (row,) = check(adapter, ("f",), None).rows
    assert row.state == ("refused" if kind else "pending")
    assert not kind or f"toy.kinds:{name} is a {kind}" in row.reason
    assert "toy.kinds" not in sys.modules


def test_only_the_group_is_refused(lab):
    engine = lab.install(
        lab.seam("toy.ops:gone", feature="f", group="a"),
        lab.seam(GOOD, feature="f", group="a"),
        lab.seam(GOOD, "toy_wrappers:add_hundred", feature="f", group="b"),
        lab.seam(OTHER, feature="g", group="a"),
    )
    ops = lab.ops
    assert lab.states(engine) == ["refused", "refused", "wrapped", "wrapped"]
    assert ops.scale(3) == 106
    assert ops.shift(3) == -4
    assert "group 'a'" in lab.faults[0][1]


def test_the_check_looks_at_modules_that_are_not_imported_and_imports_none(lab):
    lab.write({"toy/late.py": "def begin():\n    pass\n", "toy/sub/__init__.py": ""})
    engine = lab.install(lab.seam(GOOD), lab.seam("toy.late:begin", "toy_wrappers:wants_model"))
    assert untouched(lab)
    assert lab.states(engine) == ["refused", "refused"]
    assert "toy.late" not in sys.modules


def test_nothing_is_checked_before_the_first_target_appears(lab):
    engine = lab.install(lab.seam("toy.ops:gone"))
    assert lab.load("toy")
    assert lab.states(engine) == ["pending"]
    assert lab.faults == []
    assert lab.ops
    assert lab.states(engine) == ["refused"]


def test_a_refused_group_stays_refused_when_its_module_arrives_later(lab):
    engine = lab.install(lab.seam(GOOD), lab.seam("toy.users:use", "toy_wrappers:wants_model"))
    assert lab.ops
    assert lab.load("toy.users").use(3) == 6
    assert lab.states(engine) == ["refused", "refused"]
    assert len(lab.faults) == 1


# -- contradictions that only the live object shows -----------------------------------------------

SHIFTY = """
def turn(value, by=1):
    return value + by


def _other(value):
    return value


turn = _other
"""


def test_a_later_contradiction_rolls_the_group_back(lab):
    lab.write({"toy/shifty.py": SHIFTY})
    engine = lab.install(
        lab.seam(GOOD),
        lab.seam("toy.shifty:turn", "toy_wrappers:negate_by"),
        lab.seam(OTHER, feature="g"),
    )
    ops = lab.ops
    original = ops.scale.__wrapped__
    users = lab.load("toy.users")
    assert lab.states(engine) == ["wrapped", "pending", "wrapped"]
    assert lab.load("toy.shifty").turn(3) == 3
    assert lab.states(engine) == ["refused", "refused", "wrapped"]
    assert ops.scale is users.scale is original
    assert ops.shift(3) == -4
    assert "'by'" in lab.faults[0][1]


def test_a_roll_back_beneath_another_tools_wrapper_passes_calls_through(lab):
    lab.write({"toy/shifty.py": SHIFTY})
    lab.install(lab.seam(GOOD), lab.seam("toy.shifty:turn", "toy_wrappers:negate_by"))
    ops = lab.ops
    ours = ops.scale
    ops.scale = foreign = lambda value: ("theirs", ours(value))
    assert ops.scale(3) == ("theirs", -6)
    assert lab.load("toy.shifty")
    assert ops.scale is foreign
    assert ops.scale(3) == ("theirs", 6)


def test_a_roll_back_keeps_the_layer_that_another_feature_needs(lab):
    lab.write({"toy/shifty.py": SHIFTY})
    engine = lab.install(
        lab.seam(GOOD, feature="f"),
        lab.seam(GOOD, feature="g"),
        lab.seam(GOOD, "toy_wrappers:add_hundred", feature="f"),
        lab.seam("toy.shifty:turn", "toy_wrappers:negate_by", feature="f"),
    )
    users = lab.load("toy.users")
    kept = [lab.ops.scale]
    assert users.use(3) == 94
    assert lab.load("toy.shifty")
    assert lab.ops.scale(3) == users.use(3) == kept[0](3) == -6
    assert lab.states(engine) == ["refused", "wrapped", "refused", "refused"]


def test_a_symbol_that_is_no_longer_callable_is_refused(lab):
    lab.write({"toy/shifty.py": "def turn():\n    pass\n\n\nturn = 3\n"})
    engine = lab.install(lab.seam("toy.shifty:turn"))
    assert lab.load("toy.shifty").turn == 3
    assert lab.states(engine) == ["refused"]


def test_a_decorated_symbol_is_taken_at_what_it_wraps(lab):
    source = (
        "import functools\n\n\ndef deco(f):\n    @functools.wraps(f)\n"
        "    def inner(*args):\n        return f(*args)\n    return inner\n\n\n"
        "@deco\ndef turn(value, by):\n    return value + by\n"
    )
    lab.write({"toy/shifty.py": source})
    engine = lab.install(lab.seam("toy.shifty:turn", "toy_wrappers:negate_by"))
    assert lab.load("toy.shifty").turn(1, 2) == -3
    assert lab.states(engine) == ["wrapped"]


def test_a_module_without_source_is_refused(lab):
    import py_compile

    root = lab.write({"toy/bare.py": "def turn():\n    pass\n"})
    py_compile.compile(str(root / "toy/bare.py"), cfile=str(root / "toy/bare.pyc"))
    (root / "toy/bare.py").unlink()
    engine = lab.install(lab.seam("toy.bare:turn", optional=True), lab.seam(GOOD))
    assert lab.ops.scale(3) == 6
    assert lab.load("toy.bare").turn() is None
    assert lab.states(engine) == ["refused", "refused"]
    assert "no readable source" in lab.faults[0][1]


# -- broken adapters ------------------------------------------------------------------------------


def test_a_broken_probe_refuses_and_never_breaks_the_frameworks_import(lab):
    engine = lab.install(
        lab.seam(OTHER),
        lab.seam(GOOD, native="toy_wrappers:broken"),
        lab.seam(OTHER, feature="g", group="else"),
    )
    ops = lab.ops
    assert ops.scale(3) == 6
    assert lab.states(engine) == ["refused", "refused", "wrapped"]
    assert f"{GOOD}: toy_wrappers:broken failed" in lab.faults[0][1]
    assert len(lab.faults) == 1


# -- states that are no faults --------------------------------------------------------------------


def test_an_optional_module_that_is_not_installed_is_absent(lab):
    engine = lab.install(lab.seam("toy.gone:scale", optional=True), lab.seam(GOOD))
    assert lab.ops.scale(3) == -6
    assert lab.states(engine) == ["absent", "wrapped"]
    assert lab.faults == []


def test_a_module_that_a_known_version_had_is_missed_where_its_group_has_stayed(lab):
    rows = (
        lab.seam("toy.away:scale", optional=True),
        lab.seam(GOOD),
        lab.seam("toy.away:shift", feature="g", optional=True),
    )
    had = {"toy.away:scale": "toy 1.0", "toy.away:shift": ""}.get
    plan = check(lab.adapter(*rows), ("f", "g"), None, had)
    assert [row.state for row in plan.rows] == ["refused", "refused", "absent"]
    assert "module toy.away not found, and toy 1.0 had toy.away:scale" in plan.rows[1].reason
    # If the group has nothing else, the whole path is missing, so no group is patched in part.
    (alone,) = check(lab.adapter(rows[0]), ("f",), None, had).rows
    assert (alone.state, "toy 1.0 had" in alone.reason) == ("absent", True)


@pytest.mark.parametrize(
    ("had", "states"),
    [
        ({"toy.new:scale": "toy 1.0"}, ["refused", "refused"]),
        ({}, ["pending"]),  # no known version had the symbol
        ({"toy.old:scale": "toy 0.9"}, ["refused", "refused"]),
    ],
)
def test_a_symbol_that_is_at_none_of_its_places_does_not_leave_its_group_in_silence(
    lab, had, states
):
    places = [
        lab.seam(f"toy.{name}:scale", group="a", only_if=(f"toy.{name}",))
        for name in ("old", "new")
    ]
    adapter = lab.adapter(*places, lab.seam(OTHER, group="a"))
    plan = check(adapter, ("f",), None, lambda target: had.get(target, ""))
    assert [row.state for row in plan.rows] == states
    assert all("toy." in row.reason and "not found" in row.reason for row in plan.rows if had)


def test_a_symbol_that_went_to_another_of_its_places_is_not_missed(lab):
    lab.write({"toy/new.py": "def scale(value):\n    return value\n"})
    places = [
        lab.seam(f"toy.{name}:scale", group="a", only_if=(f"toy.{name}",))
        for name in ("old", "new")
    ]
    adapter = lab.adapter(*places, lab.seam(GOOD, group="a"))
    plan = check(adapter, ("f",), None, lambda target: "toy 0.9")
    assert [row.seam.target for row in plan.rows] == ["toy.new:scale", GOOD]
    assert [row.state for row in plan.rows] == ["pending", "pending"]


def test_an_optional_module_without_the_symbol_is_refused(lab):
    engine = lab.install(lab.seam("toy.ops:gone", optional=True), lab.seam(GOOD))
    assert lab.ops.scale(3) == 6
    assert lab.states(engine) == ["refused", "refused"]


def test_a_native_symbol_is_left_alone_and_its_group_patched(lab):
    engine = lab.install(
        lab.seam(GOOD, native="toy_wrappers:yes"), lab.seam(OTHER), settings="because"
    )
    ops = lab.ops
    assert type(ops.scale).__name__ == "function"
    assert ops.shift(3) == -4
    assert [(one.state, one.reason) for one in engine.report("toy")] == [
        ("native", "native: because"),
        ("wrapped", ""),
    ]


def test_informational_seams_are_never_patched(lab):
    engine = lab.install(
        lab.seam(GOOD, "", native="toy_wrappers:yes"),
        lab.seam(OTHER, "", native="toy_wrappers:no"),
        lab.seam("toy.gone:scale", "", native="toy_wrappers:yes"),
        lab.seam("toy.ops:gone", "", native="toy_wrappers:yes"),
    )
    assert untouched(lab)
    assert lab.states(engine) == ["native", "absent", "absent", "absent"]
    assert lab.faults == []


def test_a_refusal_seam_is_in_place_to_say_so(lab):
    engine = lab.install(lab.seam(GOOD, "toy_wrappers:note", refusal="cannot be had here"))
    assert lab.ops.scale(3) == 6
    assert len(lab.load("toy_wrappers").CALLS) == 1
    (seam,) = engine.report("toy")
    assert (seam.state, seam.reason) == ("refused", "cannot be had here")
    assert lab.faults == []
    assert engine.remove() == []
    assert untouched(lab)


def test_a_refusal_seam_whose_symbol_is_gone_is_absent(lab):
    engine = lab.install(lab.seam("toy.ops:gone", refusal="cannot be had"), lab.seam(OTHER))
    assert lab.ops.shift(3) == -4
    assert lab.states(engine) == ["absent", "wrapped"]


# -- looking ahead --------------------------------------------------------------------------------


def test_a_look_ahead_says_what_install_would_do_and_patches_nothing(lab):
    before = list(sys.meta_path)
    adapter = lab.adapter(
        lab.seam(GOOD),
        lab.seam("toy.ops:gone", feature="g"),
        lab.seam(OTHER, feature="h"),
        lab.seam(GOOD, feature="f", native="toy_wrappers:yes"),
        lab.seam(OTHER, feature="f", refusal="never"),
        lab.seam("toy.gone:f", feature="f", optional=True),
    )
    plan = check(adapter, ("f", "g"), "S")
    assert [(one.state, one.reason) for one in plan.predicted()] == [
        ("pending", ""),
        ("refused", "toy.ops:gone not found: no 'gone' there"),
        ("off", ""),
        ("native", "native: S"),
        ("refused", "never"),
        ("absent", "module toy.gone not found"),
    ]
    assert plan.refused == {("toy", "g", ""): ("toy.ops:gone not found: no 'gone' there",)}
    assert sys.meta_path == before
    assert "toy.ops" not in sys.modules
    assert untouched(lab)
    assert lab.faults == []
