"""Changes of the symbols that seams depend on, and how each change ends.

    python -m tests.mutants FRAMEWORK [--json]

Each change is one that a release may make: a symbol is renamed or moved, a parameter is dropped or
moved, a decorator is added, a fact's identifier is removed. The installed sources are changed in
memory; nothing is written. ``mutated_behaviour`` changes what code does. Each change must end in
one of these ways:

- refused: the plan refuses the seam's group and names the symbol.
- refused on arrival: the source does not show the change; the engine refuses the group and names
  the symbol when the module is imported.
- absent: the plan lists the whole group as absent and names the module; no seam of it is patched.
- right: the seam is patched, and its wrapper gets the caller's arguments by name. The test binds
  the wrapper to a function with the changed symbol's parameters, and calls the function.
- test: a test of ``tests/probes`` fails and is named.

A change that ends otherwise is a survivor.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import copy
import functools
import importlib
import inspect
import json
import os
import random
import re
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from precision_shim.errors import SeamError
from precision_shim.process import settings as _settings
from precision_shim.process import versions as _versions
from precision_shim.process.framework import Adapter
from precision_shim.process.registry import entries, load
from precision_shim.seams import Seam, Symbol, _source, check, look
from precision_shim.seams._call import prepare, through
from precision_shim.seams._plan import Plan, Row
from precision_shim.seams._source import Installed, looking_at

from .symbols_in_record import tested_version

ROOT = Path(__file__).parents[1]
SEED = 13
FACT = "fact removed"
ATTRIBUTE = "attribute removed"
SHARE = 32
"""How many changes a framework's tests make; a script makes all changes."""
FINE = ("refused", "refused on arrival", "absent", "right", "test")
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        kind: its class.
        target: the changed symbol.
        detail: the change in words.
        make: returns the changed sources, by module; ``None``: the module no longer exists.
        node: returns the changed symbol's syntax tree, if the symbol still exists.
    """

    kind: str
    target: str
    detail: str
    make: Callable[[], dict[str, str | None]]
    node: Callable[[], ast.AST] | None = None

    def __str__(self) -> str:
        return f"{self.kind}: {self.target}: {self.detail}"

    def concerns(self, seam: Seam) -> bool:
        """Whether a seam depends on the change; seams on one symbol rely on different facts."""
        if self.kind == FACT:
            return self.detail in seam.relies_on
        if self.kind == ATTRIBUTE:
            return seam.wrapper is not None and self.detail in set(read_of_instance(seam.wrapper))
        return True


@dataclass(frozen=True)
class End:
    """How a change ended (one of ``FINE``, or ``survives``), and why."""

    state: str
    because: str = ""


# -- sources ------------------------------------------------------------------------------------


class Sources:
    """The installed sources, each read once, with some modules replaced by changed ones."""

    def __init__(self) -> None:
        self._installed = Installed()
        self._texts: dict[str, str | None] = {}
        self.changed: Mapping[str, str | None] = {}

    def text(self, module: str) -> str | None:
        """The installed source, or ``None`` if there is no such module."""
        if module not in self._texts:
            read = self._installed.find(module)
            self._texts[module] = read() if read is not None else None
        return self._texts[module]

    def find(self, module: str) -> Callable[[], str | None] | None:
        """See ``precision_shim.seams._source.Source``."""
        text = self.changed.get(module, self.text(module))
        if text is None and (module in self.changed or self._installed.find(module) is None):
            return None
        return lambda: text


@functools.lru_cache(maxsize=64)
def _tree(text: str) -> ast.Module:
    return ast.parse(text)


def _path_to(tree: ast.AST, attribute: str) -> list[ast.AST]:
    """The nodes from the module to a symbol; fewer if a class generates its ``__init__``."""
    from precision_shim.seams._source import _member

    found: list[ast.AST] = []
    for part in attribute.split("."):
        inner = _member(found[-1] if found else tree, part)
        if inner is None:
            break
        found.append(inner)
    return found


def _span(node: Any) -> tuple[int, int]:
    """Line range of a definition and its decorators, counted from 0, without the end."""
    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
    return first - 1, node.end_lineno


def _spliced(text: str, node: Any, new: str) -> str:
    lines = text.split("\n")
    begin, end = _span(node)
    return "\n".join(
        [*lines[:begin], *textwrap.indent(new, " " * node.col_offset).split("\n"), *lines[end:]]
    )


# -- the changes --------------------------------------------------------------------------------


@dataclass
class Place:
    """A symbol that a seam would patch, and its place in the source."""

    target: str
    seams: tuple[Seam, ...]
    text: str
    nodes: list[ast.AST]
    generated: bool

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def node(self) -> Any:
        return self.nodes[-1]

    @property
    def in_class(self) -> bool:
        return "." in self.target.partition(":")[2]

    @property
    def evidence(self) -> Any:
        """The syntax tree in which the facts of a seam are looked up."""
        owner = self.nodes[-2] if len(self.nodes) > 1 else None
        return owner if isinstance(owner, ast.ClassDef) and not self.generated else self.node

    def rewritten(self, change: Callable[[Any], Any]) -> dict[str, str | None]:
        """The module with a changed copy of the symbol; ``change`` returns a node or a text."""
        new = change(copy.deepcopy(self.node))
        text = new if isinstance(new, str) else ast.unparse(ast.fix_missing_locations(new))
        return {self.module: _spliced(self.text, self.node, text)}

    def without_word(self, word: str, node: Any) -> dict[str, str | None]:
        """The module with ``word`` renamed in the lines of a node."""
        begin, end = _span(node)
        lines = self.text.split("\n")
        pattern = re.compile(rf"(?<!\w){re.escape(word)}(?!\w)")
        changed = [pattern.sub(f"{word}_gone", line) for line in lines[begin:end]]
        return {self.module: "\n".join([*lines[:begin], *changed, *lines[end:]])}


def mutants(places: Iterable[Place]) -> Iterator[Mutant]:
    """All changes of these symbols, except those that only ``tests/probes`` can notice."""
    for place in places:
        yield from _names(place)
        if isinstance(place.node, _Function):
            yield from _parameters(place)
            yield from _shapes(place)
        elif place.generated:
            yield from _fields(place)
        yield from _facts(place)


def _mutant(
    kind: str, place: Place, detail: str, change: Callable[[Any], Any], *, there: bool = True
) -> Mutant:
    return Mutant(
        kind,
        place.target,
        detail,
        lambda: place.rewritten(change),
        (lambda: change(copy.deepcopy(place.node))) if there else None,
    )


def _names(place: Place) -> Iterator[Mutant]:
    name = place.node.name

    def renamed(node: Any) -> Any:
        node.name = f"{name}_v2"
        return node

    def hidden(node: Any) -> Any:
        node.name = f"_{name}"
        return node

    yield _mutant("renamed", place, f"{name}_v2", renamed, there=False)
    yield _mutant("renamed", place, f"_{name}", hidden, there=False)
    if place.in_class and not place.generated:
        yield _mutant("moved", place, "to a class beneath", lambda _: "pass", there=False)
        yield Mutant("renamed", place.target, "its class", lambda: _class_renamed(place))
        yield _mutant(
            "moved", place, "kept as another's", lambda _: f"{name} = _others.{name}", there=False
        )
    else:
        yield _mutant(
            "moved", place, "and imported again", lambda _: f"from ._new import {name}", there=False
        )
        yield _mutant(
            "moved", place, "and made by a call", lambda _: f"{name} = _made('{name}')", there=False
        )
    yield Mutant("moved", place.target, "with its module", lambda: {place.module: None})
    if not place.generated and name not in ("__init__", "__post_init__"):
        yield _mutant(
            "body inlined", place, "into its callers, and gone", lambda _: "pass", there=False
        )


def _class_renamed(place: Place) -> dict[str, str | None]:
    owner: Any = place.nodes[-2]
    new = copy.deepcopy(owner)
    new.name = f"{owner.name}V2"
    return {place.module: _spliced(place.text, owner, ast.unparse(new))}


def _own_first(place: Place) -> int:
    """The number of leading parameters that are the instance or the class."""
    decorators = {ast.unparse(one) for one in place.node.decorator_list}
    return int(place.in_class and "staticmethod" not in decorators)


def _parameters(place: Place) -> Iterator[Mutant]:
    arguments, first = place.node.args, _own_first(place)
    positional = [*arguments.posonlyargs, *arguments.args]
    names = [one.arg for one in positional[first:]] + [one.arg for one in arguments.kwonlyargs]
    for name in names:
        yield _mutant("parameter gone", place, name, functools.partial(_without, name=name))
        yield _mutant("parameter renamed", place, name, functools.partial(_with_name, name=name))
    if len(positional) - first > 1:
        yield _mutant(
            "parameters reordered",
            place,
            "reversed",
            functools.partial(_reordered, first=first, step=-1),
        )
        yield _mutant(
            "parameters reordered",
            place,
            "the last in front",
            functools.partial(_reordered, first=first, step=1),
        )
    if len(positional) > first:
        yield _mutant(
            "parameters reordered",
            place,
            "all by name only",
            functools.partial(_by_name, first=first),
        )
        yield _mutant("parameters reordered", place, "all by position only", _by_position)
    yield _mutant("parameter added", place, "in front", functools.partial(_added, first=first))
    yield _mutant("parameter added", place, "at the end", functools.partial(_added, first=None))
    yield _mutant(
        "parameters hidden", place, "*args, **kwargs", functools.partial(_swallowed, first=first)
    )


def _without(node: Any, name: str) -> Any:
    a = node.args
    for group in (a.posonlyargs, a.args):
        for index, one in enumerate(group):
            if one.arg == name:
                at = index + (len(a.posonlyargs) if group is a.args else 0)
                from_end = len(a.posonlyargs) + len(a.args) - at
                if from_end <= len(a.defaults):
                    del a.defaults[len(a.defaults) - from_end]
                del group[index]
                return node
    for index, one in enumerate(a.kwonlyargs):
        if one.arg == name:
            del a.kwonlyargs[index], a.kw_defaults[index]
            return node
    raise AssertionError(name)


def _with_name(node: Any, name: str) -> Any:
    for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
        if one.arg == name:
            one.arg = f"{name}_v2"
    return node


def _reordered(node: Any, first: int, step: int) -> Any:
    a = node.args
    a.args, a.posonlyargs = [*a.posonlyargs, *a.args], []
    lead = len(a.args) - len(a.defaults)
    pairs = [(one, a.defaults[i - lead] if i >= lead else None) for i, one in enumerate(a.args)]
    own, rest = pairs[:first], pairs[first:]
    rest = rest[::-1] if step < 0 else [*rest[-1:], *rest[:-1]]
    # A parameter after one with a default needs a default too.
    rest = [one for one in rest if one[1] is None] + [one for one in rest if one[1] is not None]
    a.args = [one for one, _ in (*own, *rest)]
    a.defaults = [value for _, value in (*own, *rest) if value is not None]
    return node


def _by_name(node: Any, first: int) -> Any:
    a = node.args
    a.args, a.posonlyargs = [*a.posonlyargs, *a.args], []
    own, rest = a.args[:first], a.args[first:]
    missing: list[ast.expr | None] = [None] * (len(rest) - len(a.defaults))
    a.kwonlyargs = [*rest, *a.kwonlyargs]
    a.kw_defaults = [*missing, *a.defaults[-len(rest) :], *a.kw_defaults]
    a.args, a.defaults = own, []
    return node


def _by_position(node: Any) -> Any:
    node.args.posonlyargs, node.args.args = [*node.args.posonlyargs, *node.args.args], []
    return node


def _added(node: Any, first: int | None) -> Any:
    if first is None:
        node.args.kwonlyargs.append(ast.arg("added_v2"))
        node.args.kw_defaults.append(ast.Constant(None))
    else:
        group = node.args.posonlyargs if node.args.posonlyargs else node.args.args
        group.insert(first, ast.arg("added_v2"))
        if len(node.args.defaults) > len(node.args.posonlyargs) + len(node.args.args) - 1 - first:
            node.args.defaults.insert(0, ast.Constant(None))
    return node


def _swallowed(node: Any, first: int) -> Any:
    own = [*node.args.posonlyargs, *node.args.args][:first]
    node.args = ast.arguments(
        posonlyargs=[],
        args=own,
        vararg=ast.arg("args"),
        kwonlyargs=[],
        kw_defaults=[],
        kwarg=ast.arg("kwargs"),
        defaults=[],
    )
    return node


_DECORATORS = (
    "_kept_v2",
    "_hiding_v2",
    "_other_v2.with_arguments(3)",
    "property",
    "staticmethod",
    "classmethod",
    "contextmanager",
    "functools.lru_cache",
    "functools.cached_property",
)


def _shapes(place: Place) -> Iterator[Mutant]:
    has = {ast.unparse(one) for one in place.node.decorator_list}
    kinds = {"staticmethod", "classmethod", "property"}
    # Python itself fixes the kind of ``__init__`` and ``__post_init__``
    made = place.node.name in ("__init__", "__post_init__")
    for name in _DECORATORS:
        bound = name in kinds or name == "functools.cached_property"
        if name in has or (bound and (not place.in_class or has & kinds)):
            continue
        if made and (bound or name in ("contextmanager", "functools.lru_cache")):
            continue
        property_ = name in ("property", "functools.cached_property")
        yield _mutant(
            "made a property" if property_ else "decorator added",
            place,
            name,
            functools.partial(_decorated, name=name),
        )
    if not made:
        yield _mutant("another kind", place, "async", _made_async)
        yield _mutant("another kind", place, "a generator", _made_generator)
        yield _mutant("another kind", place, "a class", _made_class)
    if place.in_class:
        yield Mutant(
            "another kind", place.target, "its class a function", lambda: _owner_a_function(place)
        )


def _decorated(node: Any, name: str) -> Any:
    if name == "staticmethod":
        del [*([node.args.posonlyargs] if node.args.posonlyargs else []), node.args.args][0][0]
        lacking = len(node.args.defaults) - len(node.args.posonlyargs) - len(node.args.args)
        del node.args.defaults[: max(lacking, 0)]
    elif name == "classmethod":
        ([*node.args.posonlyargs, *node.args.args])[0].arg = "cls"
    # Insert the decorator below those that return something other than a function.
    last = {"concurrent_endpoint", "classmethod", "staticmethod", "property"}
    over = [index for index, one in enumerate(node.decorator_list, 1) if ast.unparse(one) in last]
    node.decorator_list.insert(max(over, default=0), ast.parse(name, mode="eval").body)
    return node


def _made_async(node: Any) -> Any:
    other = ast.FunctionDef if isinstance(node, ast.AsyncFunctionDef) else ast.AsyncFunctionDef
    parts = {name: getattr(node, name) for name in node._fields if hasattr(node, name)}
    return ast.copy_location(other(**parts), node)


def _made_generator(node: Any) -> Any:
    node.body = [*node.body, ast.parse("yield None").body[0]]
    return node


def _made_class(node: Any) -> Any:
    node.name, name = "__init__", node.name
    if not (node.args.args or node.args.posonlyargs) or node.args.args[:1] != ["self"]:
        first = [*node.args.posonlyargs, *node.args.args][:1]
        if not first or first[0].arg not in ("self", "cls"):
            node.args.args.insert(0, ast.arg("self"))
    node.decorator_list = []
    return ast.ClassDef(
        name=name,
        bases=[],
        keywords=[],
        body=[node],
        decorator_list=[],
        **({"type_params": []} if sys.version_info >= (3, 12) else {}),
    )


def _owner_a_function(place: Place) -> dict[str, str | None]:
    owner: Any = place.nodes[-2]
    inner = copy.deepcopy(owner)
    inner.name = f"_{owner.name}"
    text = (
        ast.unparse(inner) + f"\n\ndef {owner.name}(*args, **kwargs):\n    return {inner.name}"
        "(*args, **kwargs)"
    )
    return {place.module: _spliced(place.text, owner, text)}


def _fields(place: Place) -> Iterator[Mutant]:
    for line in place.node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            name = line.target.id
            yield _mutant(
                "parameter gone",
                place,
                name,
                functools.partial(_field_changed, name=name, new=None),
            )
            yield _mutant(
                "parameter renamed",
                place,
                name,
                functools.partial(_field_changed, name=name, new=f"{name}_v2"),
            )
    yield _mutant("parameters reordered", place, "reversed", _fields_reversed)


def _field_changed(node: Any, name: str, new: str | None) -> Any:
    for line in list(node.body):
        if isinstance(line, ast.AnnAssign) and getattr(line.target, "id", None) == name:
            if new is None:
                node.body.remove(line)
            else:
                line.target.id = new
    node.body = node.body or [ast.Pass()]
    return node


def _fields_reversed(node: Any) -> Any:
    fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
    turned = [one for one in fields if one.value is None][::-1]
    turned += [one for one in fields if one.value is not None][::-1]
    node.body = [*turned, *(one for one in node.body if not isinstance(one, ast.AnnAssign))]
    return node


def _facts(place: Place) -> Iterator[Mutant]:
    facts = dict.fromkeys(word for seam in place.seams for word in seam.relies_on)
    for word in facts:
        yield Mutant(
            FACT,
            place.target,
            word,
            functools.partial(place.without_word, word, place.evidence),
        )
    read = dict.fromkeys(
        word for seam in place.seams if seam.wrapper for word in read_of_instance(seam.wrapper)
    )
    own = look(place.target)
    for word in read:
        if word not in facts and word in own.names:
            yield Mutant(
                ATTRIBUTE,
                place.target,
                word,
                functools.partial(place.without_word, word, place.evidence),
            )


# -- the attributes of the instance that a wrapper reads ----------------------------------------


def read_of_instance(function: Any, name: str = "", depth: int = 3) -> Iterator[str]:
    """Yield attributes that a wrapper reads of ``call.instance``, also in functions it calls.

    Attributes that the wrapper reads with a default, or checks for first, are left out.

    Args:
        function: the wrapper, or a function to which the instance is passed.
        name: the parameter that is the instance; empty for a wrapper, which reads it from ``call``.
        depth: how many calls deep to follow the instance.
    """
    try:
        body: Any = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return
    if not isinstance(body, _Function):
        return
    first = body.args.args[0].arg if body.args.args else ""

    def is_instance(node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            return node.id in names
        return (
            not name
            and isinstance(node, ast.Attribute)
            and node.attr == "instance"
            and isinstance(node.value, ast.Name)
            and node.value.id == first
        )

    names = {name} if name else set()
    for node in ast.walk(body):
        if isinstance(node, ast.Assign) and is_instance(node.value):
            names |= {one.id for one in node.targets if isinstance(one, ast.Name)}
    for node in ast.walk(body):
        if isinstance(node, ast.Attribute) and is_instance(node.value):
            if isinstance(node.ctx, ast.Load) and node.attr not in ("__class__", "__dict__"):
                yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "getattr" and len(node.args) == 2 and is_instance(node.args[0]):
                if isinstance(node.args[1], ast.Constant):
                    yield str(node.args[1].value)
                continue
            called = getattr(function, "__globals__", {}).get(node.func.id)
            called = inspect.unwrap(called) if callable(called) else None
            if depth and inspect.isfunction(called):
                parameters = list(inspect.signature(called).parameters)
                for index, one in enumerate(node.args):
                    if is_instance(one) and index < len(parameters):
                        yield from read_of_instance(called, parameters[index], depth - 1)


# -- the ends -----------------------------------------------------------------------------------


class Trial:
    """A framework's seams, planned on the installed sources and on changed ones."""

    def __init__(self, framework: str) -> None:
        """Plan the installed sources.

        Args:
            framework: as users write it.
        """
        self.adapter: Adapter = load(entries(third_party=False)[framework])
        self.settings = _settings.resolve(
            environ={}, frameworks=(framework,), known_frameworks=entries(third_party=False)
        )
        self.sources = Sources()
        self.before = self._plan({})
        self.places = list(self._places())

    def _plan(self, changed: Mapping[str, str | None]) -> Plan:
        self.sources.changed = changed
        known = dict(_source._described)
        with looking_at(self.sources):
            try:
                return check(
                    self.adapter, self.settings.features, self.settings, _versions.tell_missed
                )
            finally:
                if changed:  # remove changed sources from the cache
                    _source._described.clear()
                    _source._described.update(known)

    def _places(self) -> Iterator[Place]:
        by_target: dict[str, list[Row]] = {}
        for row in self.before.rows:
            patches = row.seam.wrapper is not None and not row.seam.refusal
            if patches and row.state in ("pending", "native"):
                by_target.setdefault(row.seam.target, []).append(row)
        for target, rows in by_target.items():
            module, _, attribute = target.partition(":")
            text = self.sources.text(module)
            assert text is not None
            nodes = _path_to(_tree(text), attribute)
            generated = len(nodes) < len(attribute.split("."))
            yield Place(target, tuple(row.seam for row in rows), text, nodes, generated)

    def mutants(self) -> list[Mutant]:
        return list(mutants(self.places))

    def end(self, mutant: Mutant) -> End:
        """What becomes of a change."""
        after = self._plan(mutant.make())
        ends = [
            self._row_ends(mutant, row, after)
            for row in self.before.rows
            if row.seam.target == mutant.target
            and row.state in ("pending", "native")
            and not row.seam.refusal
            and mutant.concerns(row.seam)
        ]
        ends += self._half(after)
        worst = [one for one in ends if one.state not in FINE]
        return worst[0] if worst else min(ends, key=lambda one: FINE.index(one.state))

    def _row_ends(self, mutant: Mutant, row: Row, plan: Plan) -> End:
        same = [one for one in plan.rows if one.seam is row.seam]
        if not same:
            # The plan may report another place or form of the symbol as missing.
            module = mutant.target.partition(":")[0]
            told = [
                one.reason for one in plan.rows if one.group == row.group and module in one.reason
            ]
            return End("refused", told[0]) if told else End("survives", "gone, and nothing says so")
        (after,) = same
        if after.state == "refused":
            # A cause in another symbol of the group counts too, if it names the changed module.
            named = mutant.target.partition(":")[0] in after.reason
            return End("refused" if named else "survives", after.reason)
        if after.state == "absent":
            return End("absent" if after.reason else "survives", after.reason)
        if after.state == "native":
            return End("right", f"left alone: {after.reason}")
        if mutant.node is None:
            return End("survives", "still patched")
        return self._bound(mutant, after)

    def _half(self, plan: Plan) -> list[End]:
        """Groups that would be patched in part, because a part no longer exists."""
        left = {id(row.seam): row for row in plan.rows}
        groups: dict[Any, list[tuple[Row, Row | None]]] = {}
        for row in self.before.rows:
            if row.state == "pending" and not row.seam.refusal:
                groups.setdefault(row.group, []).append((row, left.get(id(row.seam))))
        found = []
        for group, rows in groups.items():
            gone = [row for row, after in rows if after is None or after.state == "absent"]
            stay = [row for row, after in rows if after is not None and after.state == "pending"]
            if gone and stay:
                found.append(
                    End(
                        "survives", f"{group[1]}, {group[2]}: patched without {gone[0].seam.target}"
                    )
                )
        return found

    def _bound(self, mutant: Mutant, row: Row) -> End:
        """Bind the wrapper to a function of the changed form, and call it."""
        assert mutant.node is not None
        seam = row.seam
        assert seam.wrapper is not None
        in_class = "." in seam.attribute
        node = mutant.node()
        if isinstance(node, ast.ClassDef) and not _is_data(node) and not seam.replaces:
            return End("survives", "a class, wrapped as a function")
        try:
            if seam.replaces:
                return _replaced(seam, node)
            return _bound(seam, row.symbol or Symbol(seam.target), node, in_class)
        except SeamError as error:
            return End("refused on arrival", str(error))
        except _ImpossibleError as error:
            return End("impossible", str(error))
        except Exception as error:
            return End("survives", f"the trial failed: {error!r}")


def _bound(seam: Seam, symbol: Symbol, node: Any, in_class: bool) -> End:
    assert seam.wrapper is not None
    owner, raw = stub(node, in_class)
    found = getattr(raw, "__func__", raw)
    if not callable(found):
        raise SeamError(f"{seam.target} is not callable: {found!r}")
    binding = prepare(seam.wrapper, seam.target, raw, in_class, symbol)
    read: dict[str, Any] = {}

    def standing(call: Any, **values: Any) -> Any:
        read.update(values)
        for name in change:
            call.arguments[name] = "changed"
        return call.proceed()

    async def awaiting(call: Any, **values: Any) -> Any:
        return await standing(call, **values)

    def yielding(call: Any, **values: Any) -> Any:
        yield from standing(call, **values)

    awaits = inspect.iscoroutinefunction(seam.wrapper)
    yields = inspect.isgeneratorfunction(seam.wrapper)
    stands = awaiting if awaits else yielding if yields else standing
    standing_there = through(stands, binding)
    wrapped, whom = _held(raw, owner)
    parameters = list(inspect.signature(found).parameters.values())
    own = parameters if whom is None else parameters[1:]
    named = [one for one in own if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    swallows = any(one.kind is one.VAR_KEYWORD for one in own)
    hidden = [name for name in symbol.parameters if name not in {one.name for one in named}]
    hidden = [name for name in hidden if swallows and name not in ("self", "cls")]
    for way in ("by position", "by name", "changed"):
        change = (
            [one for one in dict(binding.wanted) if one in binding.parameters]
            if way == "changed"
            else []
        )
        read.clear()
        args = [
            f"given {one.name}"
            for one in named
            if one.kind is one.POSITIONAL_ONLY
            or (one.kind is one.POSITIONAL_OR_KEYWORD and way == "by position")
        ]
        kwargs = {one.name: f"given {one.name}" for one in named[len(args) :]}
        kwargs |= {name: f"given {name}" for name in hidden}
        result = standing_there(wrapped, whom, tuple(args), kwargs)
        if awaits:
            result = asyncio.run(result)
        if yields:
            result = next(result)
        if inspect.iscoroutine(result):
            result.close()
            return End("survives", "a coroutine, and the wrapper awaits nothing")
        if inspect.isgenerator(result):
            return End("survives", "a generator, and the wrapper returns before it runs")
        if isinstance(result, contextlib.AbstractContextManager) and not isinstance(result, dict):
            return End(
                "survives", "a context manager, and the wrapper returns before it is entered"
            )
        got = result if isinstance(result, dict) else vars(whom) if whom is not None else {}
        if swallows:  # a plain parameter may be named kwargs, too
            got = {**got, **got.get("kwargs", {})}
        for name, default in binding.wanted:
            here = name in {one.name for one in named} or name in hidden
            expected = f"given {name}" if here else default
            if read[name] != expected:
                return End("survives", f"{way}: the wrapper got {read[name]!r} for {name!r}")
            if here and got and got.get(name) != ("changed" if name in change else expected):
                return End("survives", f"{way}: {name!r} arrived as {got.get(name)!r}")
    return End("right", "bound by name, called by position and by name")


def _replaced(seam: Seam, node: Any) -> End:
    """Let the wrapper make its replacement of a changed function, and call the replacement."""
    assert seam.wrapper is not None
    if isinstance(node, ast.ClassDef):
        owner, raw = object, type(node.name, (), {})
    else:
        owner, raw = stub(node, True, seam.relies_on)
    made = seam.wrapper(raw)
    instance = object.__new__(owner)
    function = made
    if hasattr(made, "_method"):  # Monarch's endpoint stores the function below its own wrapper
        function = made._method.__wrapped__
    given = [
        one
        for one in inspect.signature(raw if callable(raw) else function).parameters.values()
        if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ][1:]
    by_name = [one for one in given if one.kind is not one.POSITIONAL_ONLY]
    for named in ([one for one in given if one.kind is one.KEYWORD_ONLY], by_name):
        args = [f"given {one.name}" for one in given if one not in named]
        kwargs = {one.name: f"given {one.name}" for one in named}
        got = function(instance, *args, **kwargs)
        if inspect.iscoroutine(got):
            got = asyncio.run(got)
        if inspect.isgenerator(got):
            got = next(got)
        if any(got.get(one.name) != f"given {one.name}" for one in given):
            return End("survives", f"arrived as {got!r}")
    return End("right", "made anew of what is there, and called with what it takes")


def _held(raw: Any, owner: Any) -> tuple[Any, Any]:
    """The bound callable, and the object that a wrapper gets as its instance."""
    if owner is None:
        return raw, None
    if isinstance(raw, (staticmethod, classmethod)):
        return raw.__get__(None, owner), owner if isinstance(raw, classmethod) else None
    instance = object.__new__(owner)
    return raw.__get__(instance, owner), instance


def _is_data(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(one) for one in node.decorator_list)


def _kept(function: Any) -> Any:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


def _hiding(function: Any) -> Any:
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


class _Other:
    @staticmethod
    def with_arguments(_: int) -> Any:
        return _kept


_NAMESPACE: dict[str, Any] = {
    "dataclass": dataclass,
    "_kept_v2": _kept,
    "_hiding_v2": _hiding,
    "_other_v2": _Other,
    "contextmanager": contextlib.contextmanager,
    "functools": functools,
}


_KEPT = {"concurrent_endpoint", "property", "staticmethod", "classmethod", *_NAMESPACE}


def stub(node: Any, in_class: bool, mentions: tuple[str, ...] = ()) -> tuple[Any, Any]:
    """A function with a changed symbol's parameters, which returns its arguments.

    Args:
        node: the changed symbol's syntax tree, which is modified.
        in_class: whether the symbol is in a class.
        mentions: names that the function's code has to contain.

    Returns:
        The class that contains the function (``None`` if there is none), and the function.
    """
    space: dict[str, Any] = dict(_NAMESPACE, _here=mock.MagicMock())
    if isinstance(node, ast.ClassDef):
        _plain_fields(node)
        name, body = node.name, [node]
    else:
        _plain(node, mentions)
        name, body = ("Owner" if in_class else node.name), [node]
        if in_class:
            owner = ast.parse("class Owner: pass").body[0]
            owner.body = body  # type: ignore[attr-defined]
            body = [owner]
    if "concurrent_endpoint" in ast.unparse(body[0]):
        space["concurrent_endpoint"] = importlib.import_module("monarch.actor").concurrent_endpoint
    code = compile(ast.fix_missing_locations(ast.Module(body, [])), "changed", "exec")
    try:
        exec(code, space)
    except Exception as error:
        raise _ImpossibleError(repr(error)) from error
    if not in_class:
        return None, space[name]
    inner = "__init__" if isinstance(node, ast.ClassDef) else node.name
    return space[name], vars(space[name])[inner]


class _ImpossibleError(Exception):
    """A package below the framework rejects the definition, so no release can contain it."""


def _plain_fields(node: ast.ClassDef) -> None:
    """Reduce a dataclass to its fields, with defaults that need no framework."""
    fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
    for one in fields:
        one.annotation = ast.Name("object", ast.Load())
        if one.value is not None:
            one.value = ast.Constant(f"default of {ast.unparse(one.target)}")
    node.body, node.bases, node.keywords = [*fields] or [ast.Pass()], [], []
    node.decorator_list = [ast.parse("dataclass(kw_only=True)", mode="eval").body]


def _plain(node: Any, mentions: tuple[str, ...]) -> None:
    """Remove annotations, and a body and decorators that need the framework."""
    for one in ast.walk(node.args):
        if isinstance(one, ast.arg):
            one.annotation = None
    names = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
    node.args.defaults = [
        ast.Constant(f"default of {name}") for name in names[len(names) - len(node.args.defaults) :]
    ]
    node.args.kw_defaults = [
        value and ast.Constant(f"default of {one.arg}")
        for one, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    ]
    node.returns = None
    node.decorator_list = [
        one for one in node.decorator_list if ast.unparse(one).partition(".")[0] in _KEPT
    ]
    generator = any(isinstance(one, (ast.Yield, ast.YieldFrom)) for one in _own_nodes(node))
    returns = "yield dict(locals())" if generator else "return dict(locals())"
    if node.name == "__init__":
        returns = "self.__dict__.update(locals())"
    names = [f"_here.{name}" for name in mentions if name.isidentifier()]
    node.body = ast.parse("\n".join([*names, returns])).body


def _own_nodes(node: Any) -> Iterator[ast.AST]:
    pending = list(node.body)
    while pending:
        one = pending.pop()
        yield one
        if not isinstance(one, (*_Function, ast.Lambda, ast.ClassDef)):
            pending += list(ast.iter_child_nodes(one))


# -- all of it ----------------------------------------------------------------------------------


def run(framework: str, share: int | None = None, only: str = "") -> list[tuple[Mutant, End]]:
    """Make the changes for a framework's seams and return how each ended.

    Args:
        framework: as users write it.
        share: how many changes, drawn by ``SEED``; ``None`` for all.
        only: a pattern for class, target and detail.
    """
    trial = Trial(framework)
    chosen = [one for one in trial.mutants() if re.search(only, str(one))]
    if share is not None:
        chosen = random.Random(SEED).sample(chosen, min(share, len(chosen)))
        order = {place.target: index for index, place in enumerate(trial.places)}
        chosen.sort(key=lambda one: order[one.target])
    ended = [(one, judged(one, trial.end(one))) for one in chosen]
    return [(one, end) for one, end in ended if end.state != "impossible"]


JUDGED: tuple[tuple[str, str, str], ...] = (
    (
        ATTRIBUTE,
        r"MegatronPolicyWorkerBase\.init_model: provider$",
        "the class above sets it, whose seams are of the same group and rely on it",
    ),
)
"""Survivors that do no harm: class, pattern of target and detail, and the reason."""


def judged(mutant: Mutant, end: End) -> End:
    """Mark a survivor that is listed in ``JUDGED``."""
    if end.state == "survives":
        for kind, pattern, why in JUDGED:
            if mutant.kind == kind and re.search(pattern, f"{mutant.target}: {mutant.detail}"):
                return End("judged", why)
    return end


def hold(framework: str) -> None:
    """Assert that a sample of changes ends well; another process makes those of behaviour.

    Args:
        framework: as users write it.
    """
    tested_version(load(entries(third_party=False)[framework]))
    ended = [(str(mutant), end) for mutant, end in run(framework, SHARE)]
    command = [sys.executable, "-W", "ignore", "-m", "tests.mutated_behaviour", framework]
    done = subprocess.run(
        [*command, "--share", str(SHARE // 4), "--json"],
        cwd=ROOT,
        env={**os.environ, "PRECISION_SHIM": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    changed = json.loads(done.stdout.splitlines()[-1])
    ended += [(": ".join(one[:3]), End(one[3], one[4])) for one in changed]
    left = [f"{told}: {end.because}" for told, end in ended if end.state not in (*FINE, "judged")]
    assert not left, "\n".join(left)
    assert len({end.state for _, end in ended}) > 2


def main() -> int:
    """Print the counts of ends by class of change, and the survivors."""
    parser = argparse.ArgumentParser(description=__doc__, add_help=True)
    parser.add_argument("framework")
    parser.add_argument("--share", type=int)
    parser.add_argument("--only", metavar="PATTERN", default="")
    parser.add_argument("--json", action="store_true", dest="as_json")
    asked = parser.parse_args()
    begin = time.process_time()
    ended = run(asked.framework, asked.share, asked.only)
    print(f"{time.process_time() - begin:.1f} s of processor time", file=sys.stderr)
    if asked.as_json:
        print(json.dumps([[m.kind, m.target, m.detail, e.state, e.because] for m, e in ended]))
        return 0
    table = Counter((mutant.kind, end.state) for mutant, end in ended)
    for kind in dict.fromkeys(mutant.kind for mutant, _ in ended):
        told = [f"{count} {state}" for (one, state), count in sorted(table.items()) if one == kind]
        print(f"{kind:<22} {', '.join(told)}")
    survivors = [(mutant, end) for mutant, end in ended if end.state == "survives"]
    print(f"{len(ended)} changes, {len(survivors)} survivors")
    for mutant, end in survivors:
        print(f"  {mutant}: {end.because}")
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main())
