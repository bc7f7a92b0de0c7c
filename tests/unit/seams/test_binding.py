"""A wrapper gets the call, and by name those arguments that it reads."""

from __future__ import annotations

import pytest

from precision_shim.seams import around

SHAPES = {
    "toy/shapes.py": """
import functools


def plain(a, b=2, *, c=3):
    return a, b, c


def only(a, b=2, /):
    return a, b


def many(a, *rest, c=3, **more):
    return a, rest, c, more


CALLED = []


def hidden_by_decorator(function):
    def inner(*args, **kwargs):
        CALLED.append(args)
        return function(*args, **kwargs)

    return inner


@hidden_by_decorator
def hidden(a, b=2, *, c=3):
    return a, b, c


@hidden_by_decorator
def computed(a, b=len("bb"), *, c=3):
    return a, b, c


class Shape:
    def method(self, a, b=2):
        return self, a, b

    @hidden_by_decorator
    def veiled(self, a, b=2):
        return self, a, b

    @classmethod
    def made(cls, a, b=2):
        return cls, a, b

    @staticmethod
    def free(a, b=2):
        return a, b
""",
    "shape_wrappers.py": """
SEEN = []


def reads(call, a, b, c):
    SEEN.append((call.instance, a, b, c, dict(call.arguments)))
    return call.proceed()


def reads_two(call, a, b):
    SEEN.append((call.instance, a, b, dict(call.arguments)))
    return call.proceed()


def reads_new(call, a, new="none yet"):
    SEEN.append((a, new, "new" in call.parameters, dict(call.arguments)))
    call.arguments.pop("new", None)
    return call.proceed()


def reads_hidden(call, a, b=None):
    SEEN.append((call.instance, a, b))
    return call.proceed()


def changes(call, b):
    call.arguments["b"] = b * 10
    return call.proceed()


def leaves_out(call):
    call.arguments.pop("b", None)
    return call.proceed()


def adds_more(call):
    call.arguments["extra"] = 1
    return call.proceed()


def twice_or_never(call, a):
    return [call.proceed() for _ in range(a)]
""",
}


@pytest.fixture
def shape(lab):
    """Return a function that wraps a symbol of ``toy.shapes`` and returns the calls seen."""
    lab.write(SHAPES)

    def put(symbol, wrapper, **fields):
        made = lab.seam(f"toy.shapes:{symbol}", f"shape_wrappers:{wrapper}", **fields)
        engine = lab.install(made)
        module = lab.load("toy.shapes")
        assert lab.states(engine) == ["wrapped"], engine.report("toy")
        return module, lab.load("shape_wrappers").SEEN

    return put


@pytest.mark.parametrize(
    ("args", "kwargs", "read", "passed"),
    [
        ((1,), {}, (1, 2, 3), {"a": 1}),
        ((1, 5), {"c": 6}, (1, 5, 6), {"a": 1, "b": 5, "c": 6}),
        ((), {"b": 5, "a": 1}, (1, 5, 3), {"a": 1, "b": 5}),
    ],
    ids=["defaults", "positional", "keyword"],
)
def test_arguments_are_read_by_name_and_arguments_has_what_was_passed(
    shape, args, kwargs, read, passed
):
    shapes, seen = shape("plain", "reads")
    assert shapes.plain(*args, **kwargs) == read
    assert seen == [(None, *read, passed)]


def test_a_methods_instance_is_no_argument(shape):
    shapes, seen = shape("Shape.method", "reads_two")
    one = shapes.Shape()
    assert one.method(1) == shapes.Shape.method(one, 1) == (one, 1, 2)
    assert shapes.Shape.method(self=one, a=1, b=5) == (one, 1, 5)
    assert [entry[1:3] for entry in seen] == [(1, 2), (1, 2), (1, 5)]
    assert [entry[0] for entry in seen[:2]] == [one, one]


def test_a_method_called_on_something_else_keeps_its_arguments(shape):
    shapes, seen = shape("Shape.method", "reads_two")
    assert shapes.Shape.method("no shape", 1, b=5) == ("no shape", 1, 5)
    assert seen == [(None, 1, 5, {"self": "no shape", "a": 1, "b": 5})]


def test_a_classmethods_instance_is_the_class(shape):
    shapes, seen = shape("Shape.made", "reads_two", unbound=True)
    assert shapes.Shape.made(1) == shapes.Shape().made(1) == (shapes.Shape, 1, 2)
    assert seen == [(shapes.Shape, 1, 2, {"a": 1})] * 2


def test_a_staticmethod_has_no_instance(shape):
    shapes, seen = shape("Shape.free", "reads_two", unbound=True)
    assert shapes.Shape.free(1) == shapes.Shape().free(1) == (1, 2)
    assert seen == [(None, 1, 2, {"a": 1})] * 2


@pytest.mark.parametrize(
    ("args", "kwargs"), [((1,), {}), ((1, 5), {}), ((1,), {"b": 5}), ((), {"a": 1})]
)
def test_a_change_reaches_what_is_beneath_however_it_was_passed(shape, args, kwargs):
    shapes, _ = shape("plain", "changes")
    given = dict(zip("ab", args, strict=False)) | kwargs
    assert shapes.plain(*args, **kwargs) == (1, 10 * given.get("b", 2), 3)


def test_what_is_positional_only_is_passed_by_position(shape):
    shapes, _ = shape("only", "changes")
    assert shapes.only(1) == (1, 20)
    assert shapes.only(1, 5) == (1, 50)


def test_what_is_taken_out_gets_its_default(shape):
    shapes, _ = shape("plain", "leaves_out")
    assert shapes.plain(1, 5, c=6) == shapes.plain(1, b=5, c=6) == (1, 2, 6)


def test_unnamed_and_unknown_arguments_go_on_as_they_came(shape):
    shapes, _ = shape("many", "adds_more")
    assert shapes.many(1, 8, 9, c=4, d=5) == (1, (8, 9), 4, {"d": 5, "extra": 1})
    assert shapes.many(a=1) == (1, (), 3, {"extra": 1})


def test_a_parameter_that_this_version_lacks_has_the_wrappers_default(shape):
    shapes, seen = shape("plain", "reads_new")
    assert shapes.plain(1) == (1, 2, 3)
    assert shapes.plain(1, new="given") == (1, 2, 3)
    assert seen == [(1, "none yet", False, {"a": 1}), (1, "given", False, {"a": 1, "new": "given"})]


@pytest.mark.parametrize("name", ["hidden", "Shape.veiled"])
def test_where_a_decorator_hides_the_signature_the_source_has_the_names(shape, name):
    shapes, seen = shape(name, "reads_hidden")
    one = shapes.Shape()
    function = one.veiled if "." in name else shapes.hidden
    assert function(1) == ((one, 1, 2) if "." in name else (1, 2, 3))
    function(1, 5)
    function(a=1, b=6)
    assert [entry[1:] for entry in seen] == [(1, 2), (1, 5), (1, 6)]


def test_a_hidden_symbol_has_the_defaults_of_its_source(shape):
    shapes, seen = shape("hidden", "reads")
    assert shapes.hidden(1, 5, c=6) == (1, 5, 6)
    assert shapes.hidden(1) == (1, 2, 3)
    assert [entry[1:4] for entry in seen] == [(1, 5, 6), (1, 2, 3)]


def test_a_hidden_default_that_is_no_literal(shape):
    shapes, _ = shape("computed", "reads")
    assert shapes.computed(1, 5, c=6) == (1, 5, 6)
    shapes.CALLED.clear()
    with pytest.raises(TypeError, match=r"toy\.shapes:computed was called without 'b'.*reads"):
        shapes.computed(1)
    assert shapes.CALLED == []  # the refusal comes before the symbol's code


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        ((), {}, "missing 1 required positional argument: 'a'"),
        ((1,), {"a": 2}, "multiple values for argument 'a'"),
        ((1, 2, 3), {}, "takes from 1 to 2 positional arguments"),
        ((1,), {"d": 4}, "unexpected keyword argument 'd'"),
    ],
)
def test_a_callers_mistake_is_the_symbols_own_error(shape, args, kwargs, says):
    shapes, _ = shape("plain", "reads")
    with pytest.raises(TypeError, match=f"plain.*{says}"):
        shapes.plain(*args, **kwargs)


def test_a_wrapper_may_proceed_more_than_once_or_never(shape):
    shapes, _ = shape("plain", "twice_or_never")
    assert shapes.plain(0) == []
    assert shapes.plain(2) == [(2, 2, 3)] * 2


def test_around_puts_a_wrapper_over_a_bound_method(lab):
    lab.write(SHAPES)
    one, wrappers = lab.load("toy.shapes").Shape(), lab.load("shape_wrappers")
    assert around(wrappers.changes, one.method, one, (1,), {"b": 5}) == (one, 1, 50)
    assert around(wrappers.changes, one.method, one, (1, 5), {}) == (one, 1, 50)
    found = around(wrappers.reads_hidden, one.veiled, one, (1, 5), {}, positional=("a", "b"))
    assert found == (one, 1, 5)
    assert [(one, 1, 5)] == wrappers.SEEN
