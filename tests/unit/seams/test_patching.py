"""A seam is patched without affecting other seams, and is removed without a trace."""

from __future__ import annotations

import copy
import functools
import inspect
import sys

import pytest

OPS = "toy.ops:scale"
KINDS = ("scale", "Box.add", "Box.make", "Box.double", "Box.__init__")


def contents(space):
    """A namespace's content: names in order, and the identities of the objects."""
    return [(name, id(value)) for name, value in vars(space).items()]


def test_replaces_methods_of_every_kind(lab):
    ops = lab.ops
    lab.install(
        lab.seam("toy.ops:Box.add"),
        lab.seam("toy.ops:Box.double"),
        lab.seam("toy.ops:Box.make", "toy_wrappers:note", unbound=True),
        lab.seam("toy.ops:Box.__init__", "toy_wrappers:note"),
    )
    box = ops.Box.make(5)
    calls = lab.load("toy_wrappers").CALLS
    assert type(box) is ops.Box
    assert box.add(1) == -6
    assert ops.Box.double(4) == ops.Box(0).double(4) == -8
    assert calls[0] == (ops.Box, {"value": 5})
    assert calls[1] == (box, {"value": 5})


def test_a_feature_that_is_off_watches_no_module(lab):
    before = list(sys.meta_path)
    lab.install(lab.seam(OPS, feature="f"), features=("g",))
    spec = lab.ops.__spec__
    assert lab.ops.scale(3) == 6
    assert type(spec.loader).__module__ == "_frozen_importlib_external"
    assert [one for one in sys.meta_path if one not in before and one._names] == []


@pytest.mark.parametrize("name", KINDS)
def test_uninstall_leaves_the_very_same_namespace(lab, name):
    ops = lab.ops
    module, box = contents(ops), contents(ops.Box)
    engine = lab.install(lab.seam(f"toy.ops:{name}"))
    assert (contents(ops), contents(ops.Box)) != (module, box)
    assert engine.remove() == []
    assert (contents(ops), contents(ops.Box)) == (module, box)


def test_uninstall_before_the_import_leaves_nothing(lab):
    engine = lab.install(lab.seam(OPS))
    engine.remove()
    assert lab.ops.scale(3) == 6
    assert type(lab.ops.scale).__name__ == "function"


@pytest.mark.parametrize("name", ["Box.inherited", "Crate.add"])
def test_an_inherited_method_is_refused_and_not_copied_down(lab, name):
    lab.write({"toy/crates.py": "from toy.ops import Box\n\n\nclass Crate(Box):\n    pass\n"})
    module = "toy.crates" if name.startswith("Crate") else "toy.ops"
    owner = getattr(lab.load(module), name.partition(".")[0])
    before = contents(owner)
    engine = lab.install(lab.seam(f"{module}:{name}"))
    assert lab.states(engine) == ["refused"]
    assert contents(owner) == before


def test_a_method_that_only_exists_live_on_the_parent_is_refused(lab):
    # The source has the method, but the imported class was changed before the patching.
    box = lab.ops.Box
    del box.add
    box.__base__.add = lambda self, amount: amount
    before = contents(box)
    engine = lab.install(lab.seam("toy.ops:Box.add"))
    assert lab.states(engine) == ["refused"]
    assert contents(box) == before


def test_the_wrapper_looks_like_what_it_wraps_and_is_marked(lab):
    lab.install(lab.seam(OPS))
    scale = lab.ops.scale
    assert scale.__name__ == "scale"
    assert scale.__module__ == "toy.ops"
    assert str(inspect.signature(scale)) == "(value, factor=2)"
    assert inspect.isfunction(scale)
    assert "value * factor" in inspect.getsource(scale)
    assert scale._self_precision_shim == "precision_shim:toy"


def test_two_wrappers_of_one_target_nest_in_the_order_of_the_table(lab):
    ops = lab.ops
    before = contents(ops)
    engine = lab.install(
        lab.seam(OPS, "toy_wrappers:negate", feature="f"),
        lab.seam(OPS, "toy_wrappers:add_hundred", feature="g"),
    )
    assert ops.scale(3) == -6 + 100
    engine.remove()
    assert contents(ops) == before


def test_two_adapters_share_one_target(lab):
    ops = lab.ops
    before = contents(ops)
    engine = lab.install(lab.seam(OPS), framework="one")
    engine.add(lab.adapter(lab.seam(OPS), framework="two"))
    assert ops.scale(3) == -6
    engine.add(lab.adapter(lab.seam(OPS, "toy_wrappers:add_hundred"), framework="three"))
    assert ops.scale(3) == -6 + 100
    engine.remove()
    assert contents(ops) == before


def test_a_later_adapters_layer_reaches_what_was_imported_by_value_in_between(lab):
    engine = lab.install(lab.seam(OPS), framework="one")
    users = lab.load("toy.users")
    before_shim = lab.ops.scale.__wrapped__
    engine.add(lab.adapter(lab.seam(OPS, "toy_wrappers:add_hundred"), framework="two"))
    assert users.use(3) == users.renamed(3) == -6 + 100
    engine.remove()
    assert users.scale is users.renamed is lab.ops.scale is before_shim


def test_giving_back_does_not_wake_lazy_modules(lab):
    from importlib.util import LazyLoader, find_spec, module_from_spec

    lab.write({"toy/lazy.py": "raise AssertionError('was loaded')\n"})
    spec = find_spec("toy.lazy")
    spec.loader = LazyLoader(spec.loader)
    module = module_from_spec(spec)
    sys.modules["toy.lazy"] = module
    spec.loader.exec_module(module)
    engine = lab.install(lab.seam(OPS))
    assert lab.ops.scale(3) == -6
    assert engine.remove() == []


# -- aliases --------------------------------------------------------------------------------------

ALIASES = ("toy.users:scale", "toy.users:renamed")


@pytest.mark.parametrize("order", ["before", "between", "after"])
def test_declared_aliases_are_reached_in_every_import_order(lab, order):
    if order != "before":
        assert lab.ops.scale(3) == 6
    if order == "after":
        assert lab.load("toy.users").use(3) == 6
    engine = lab.install(lab.seam(OPS, aliases=ALIASES))
    users = lab.load("toy.users")
    assert lab.ops.scale(3) == users.use(3) == users.renamed(3) == -6
    assert [(one.state, one.reason) for one in engine.report("toy")] == [("wrapped", "")]
    engine.remove()
    assert lab.ops.scale is users.scale is users.renamed
    assert users.use(3) == 6


def test_a_late_install_does_not_reach_undeclared_names(lab):
    users = lab.load("toy.users")
    lab.install(lab.seam(OPS, aliases=ALIASES[:1]))
    assert users.scale(3) == -6
    assert users.renamed(3) == 6


def test_an_alias_that_holds_something_else_is_left_alone_and_reported(lab):
    users = lab.load("toy.users")
    users.scale = mine = lambda value: "mine"
    engine = lab.install(lab.seam(OPS, aliases=ALIASES))
    (seam,) = engine.report("toy")
    assert users.scale is mine
    assert users.renamed(3) == -6
    assert seam.state == "wrapped"
    assert "toy.users:scale" in seam.reason
    assert "renamed" not in seam.reason


def test_an_alias_that_does_not_exist_is_no_fault(lab):
    users = lab.load("toy.users")
    before = contents(users)
    engine = lab.install(lab.seam(OPS, aliases=("toy.users:nothing", "toy.nowhere:scale")))
    assert [(one.state, one.reason) for one in engine.report("toy")] == [("wrapped", "")]
    assert contents(users) == before


def test_an_alias_declared_by_one_of_two_layers_gets_both_and_is_given_back(lab):
    users = lab.load("toy.users")
    original = users.scale
    engine = lab.install(lab.seam(OPS, aliases=ALIASES), lab.seam(OPS, "toy_wrappers:add_hundred"))
    assert users.use(3) == users.renamed(3) == -6 + 100
    engine.remove()
    assert users.scale is users.renamed is original


# -- other tools ----------------------------------------------------------------------------------


def theirs(function):
    def wrapper(*args, **kwargs):
        return ("theirs", function(*args, **kwargs))

    return wrapper


def test_another_tools_wrapper_over_ours_survives_uninstall(lab):
    engine = lab.install(lab.seam(OPS))
    ops = lab.ops
    ops.scale = foreign = theirs(ops.scale)
    assert ops.scale(3) == ("theirs", -6)
    left = engine.remove()
    assert len(left) == 1
    assert OPS in left[0]
    assert ops.scale is foreign
    assert ops.scale(3) == ("theirs", 6)


def test_a_symbol_that_another_tool_replaced_is_told_by_status_and_install(lab):
    engine = lab.install(lab.seam(OPS), lab.seam("toy.ops:Box.make"))
    ops = lab.ops
    ours, ops.scale = ops.scale, lambda value: value
    one, other = engine.report("toy")
    assert (one.state, other.state) == ("refused", "wrapped")
    assert "another tool has replaced the shim's wrapper" in one.reason
    engine.catch_up()
    ((framework, said),) = lab.faults
    assert framework == "toy"
    assert said.startswith("toy 1.0: toy.ops:scale: another tool has replaced")
    assert [str(error) for error in engine.faults("toy")] == [said]
    ops.scale = ours
    assert lab.states(engine) == ["wrapped"] * 2


@pytest.mark.parametrize("name", ["scale", "Box.add", "Box.make"])
def test_another_tools_wrapper_that_names_ours_replaces_nothing(lab, name):
    engine = lab.install(lab.seam(f"toy.ops:{name}"))
    owner = lab.ops.Box if "." in name else lab.ops
    name = name.rpartition(".")[2]
    ours = getattr(owner, name)

    @functools.wraps(ours)
    def foreign(*args):
        return ("theirs", ours(*args))

    setattr(owner, name, staticmethod(foreign) if name == "make" else foreign)
    engine.catch_up()
    assert lab.states(engine) == ["wrapped"]
    assert lab.faults == []


def test_a_class_that_another_tool_replaced_is_told_unless_it_inherits(lab):
    engine = lab.install(lab.seam("toy.ops:Box.add"))
    lab.ops.Box = type("Crate", (lab.ops.Box,), {})
    assert lab.states(engine) == ["wrapped"]
    lab.ops.Box = type("Crate", (), {"add": lambda self, amount: amount})
    assert lab.states(engine) == ["refused"]


def test_names_imported_by_value_are_given_back_also_beneath_another_tools_wrapper(lab):
    engine = lab.install(lab.seam(OPS))
    ops, users = lab.ops, lab.load("toy.users")
    original = ops.scale.__wrapped__
    ops.scale = theirs(ops.scale)
    engine.remove()
    assert users.scale is users.renamed is original


def test_another_tools_wrapper_beneath_ours_is_what_uninstall_restores(lab):
    ops = lab.ops
    ops.scale = foreign = theirs(ops.scale)
    engine = lab.install(lab.seam(OPS, "toy_wrappers:note"))
    assert ops.scale(3) == ("theirs", 6)
    assert lab.load("toy_wrappers").CALLS
    assert engine.remove() == []
    assert ops.scale is foreign


def test_another_tool_that_left_again_is_not_reported(lab):
    ops = lab.ops
    before = contents(ops)
    engine = lab.install(lab.seam(OPS))
    ours, ops.scale = ops.scale, theirs(ops.scale)
    ops.scale = ours
    assert engine.remove() == []
    assert contents(ops) == before


# -- copies ---------------------------------------------------------------------------------------


def test_a_bound_method_is_copied_with_its_object(lab):
    lab.install(lab.seam("toy.ops:Box.add"))
    box = lab.ops.Box([1])
    holder = copy.deepcopy({"box": box, "hook": box.add})
    assert holder["hook"].__self__ is holder["box"] is not box
    assert copy.copy(box.add).__self__ is box
