"""Changes of the symbols that seams depend on, each of which a plan must notice.

A release may rename or move a symbol, drop a parameter, make a function a property or a coroutine,
or no longer mention a fact. The installed sources are changed in memory; nothing is written. Each
change must end in one of these ways:

- refused: the plan refuses the seam's group and names the symbol's module.
- absent: the plan lists the whole group as absent and gives a reason; no seam of it is patched.
- native: the shim leaves the changed symbol alone and says why.

A change that ends otherwise is a survivor. Changes that do no harm, such as a parameter that no
wrapper reads, are not made: ``tests/unit/seams/test_binding.py`` holds how arguments are bound.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import random
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from precision_shim.process import settings as _settings
from precision_shim.process.framework import Adapter
from precision_shim.process.registry import entries, load
from precision_shim.process.symbols import missed
from precision_shim.seams import Seam, _source, check
from precision_shim.seams._plan import Row, SeamPlan
from precision_shim.seams._seam import kind_of
from precision_shim.seams._source import _member, looking_at

from .symbols_in_record import tested_version

SEED = 13
SHARE = 32
"""How many changes a framework's tests make."""
FACT = "fact removed"
PARAMETER = "parameter gone"
KIND = "another kind"

JUDGED = (
    (
        "renamed",
        r"sources:\w+WeightSource\.__iter__: its class$",
        "the audit reads the streams of the other classes, and not of this one",
    ),
)
"""Survivors that do no harm: kind, pattern of target and detail, and the reason."""
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        kind: its class.
        target: the changed symbol.
        detail: the change in words.
        make: returns the changed sources, by module; ``None``: the module no longer exists.
    """

    kind: str
    target: str
    detail: str
    make: Callable[[], dict[str, str | None]]

    def __str__(self) -> str:
        return f"{self.kind}: {self.target}: {self.detail}"

    def concerns(self, seam: Seam) -> bool:
        """Whether a seam depends on the change; seams on one symbol rely on different facts."""
        if self.kind == FACT:
            return self.detail in seam.relies_on
        if self.kind == PARAMETER:
            return self.detail in required(seam)
        return self.kind != KIND or not is_special(seam)


class Sources:
    """The installed sources, each read once, with some modules replaced by changed ones."""

    def __init__(self) -> None:
        self._installed = _source.installed
        self._texts: dict[str, str | None] = {}
        self.changed: Mapping[str, str | None] = {}

    def text(self, module: str) -> str | None:
        """The installed source, or ``None`` if there is no such module."""
        if module not in self._texts:
            read = self._installed(module)
            self._texts[module] = read() if read is not None else None
        return self._texts[module]

    def find(self, module: str) -> Callable[[], str | None] | None:
        """See ``precision_shim.seams._source.Source``."""
        text = self.changed.get(module, self.text(module))
        if text is None and (module in self.changed or self._installed(module) is None):
            return None
        return lambda: text


@functools.lru_cache(maxsize=64)
def _tree(text: str) -> ast.Module:
    return ast.parse(text)


def _path_to(tree: ast.AST, attribute: str) -> list[ast.AST]:
    """The nodes from the module to a symbol; fewer if a class generates its ``__init__``."""
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


# -- the changes --------------------------------------------------------------------------------


@dataclass
class Place:
    """A symbol that a seam would patch, and its place in the source."""

    target: str
    seams: tuple[Seam, ...]
    text: str
    nodes: list[Any]
    generated: bool

    def spliced(self, node: Any, new: ast.AST | str) -> dict[str, str | None]:
        """The module with another definition in place of a node."""
        text = new if isinstance(new, str) else ast.unparse(ast.fix_missing_locations(new))
        lines, (begin, end) = self.text.split("\n"), _span(node)
        new_lines = textwrap.indent(text, " " * node.col_offset).split("\n")
        lines[begin:end] = new_lines
        return {self.target.partition(":")[0]: "\n".join(lines)}

    def without_word(self, word: str) -> dict[str, str | None]:
        """The module with ``word`` renamed where a seam's facts are looked up."""
        owner = self.nodes[-2] if len(self.nodes) > 1 else None
        in_owner = isinstance(owner, ast.ClassDef) and not self.generated
        begin, end = _span(owner if in_owner else self.nodes[-1])
        lines = self.text.split("\n")
        pattern = re.compile(rf"(?<!\w){re.escape(word)}(?!\w)")
        lines[begin:end] = [pattern.sub(f"{word}_gone", line) for line in lines[begin:end]]
        return {self.target.partition(":")[0]: "\n".join(lines)}

    def mutants(self) -> Iterator[Mutant]:
        """All changes of this symbol."""
        target, node, name = self.target, self.nodes[-1], self.nodes[-1].name

        def mutant(kind: str, detail: str, change: Callable[[Any], Any], at: Any = node) -> Mutant:
            return Mutant(kind, target, detail, lambda: self.spliced(at, change(copy.deepcopy(at))))

        in_class = "." in target.partition(":")[2]
        for new in (f"{name}_v2", f"_{name}"):
            yield mutant("renamed", new, functools.partial(_set, name=new))
        if in_class and not self.generated:
            owner = self.nodes[-2]
            yield mutant("renamed", "its class", lambda one: _set(one, f"{one.name}V2"), owner)
            yield mutant("moved", "to a class beneath", lambda _: "pass")
            yield mutant("moved", "kept as another's", lambda _: f"{name} = _others.{name}")
            yield mutant(KIND, "its class a function", _in_a_function, owner)
        else:
            yield mutant("moved", "and imported again", lambda _: f"from ._new import {name}")
            yield mutant("moved", "and made by a call", lambda _: f"{name} = _made('{name}')")
        yield Mutant("moved", target, "with its module", lambda: {target.partition(":")[0]: None})
        if isinstance(node, _Function) and name not in ("__init__", "__post_init__"):
            yield mutant(KIND, "async", _made_async)
            yield mutant(KIND, "a generator", _made_generator)
            yield mutant(KIND, "a class", lambda one: f"class {one.name}:\n    pass")
            kinds = ("property", "functools.cached_property") if in_class else ()
            for decorator in (*kinds, "contextmanager"):
                yield mutant(KIND, decorator, functools.partial(_decorated, name=decorator))
        for word in dict.fromkeys(word for seam in self.seams for word in required(seam)):
            if self.generated or isinstance(node, _Function):
                yield mutant(PARAMETER, word, functools.partial(_renamed_inside, name=word))
        facts = dict.fromkeys(word for seam in self.seams for word in seam.relies_on)
        for word in facts:
            yield Mutant(FACT, target, word, functools.partial(self.without_word, word))


def required(seam: Seam) -> list[str]:
    """The parameters that a seam's wrapper reads and has no default for."""
    if seam.replaces or seam.wrapper is None:
        return []
    parameters = list(inspect.signature(seam.wrapper).parameters.values())[1:]
    return [one.name for one in parameters if one.default is one.empty and one.kind < 4]


def is_special(seam: Seam) -> bool:
    """Whether a seam's wrapper is for what is no plain function."""
    return seam.replaces or kind_of(seam.wrapper)[0] != ""


def _set(node: Any, name: str) -> Any:
    node.name = name
    return node


def _in_a_function(owner: Any) -> str:
    name = owner.name
    owner.name = f"_{name}"
    return ast.unparse(owner) + f"\n\ndef {name}(*args):\n    return _{name}(*args)"


def _decorated(node: Any, name: str) -> Any:
    node.decorator_list.append(ast.parse(name, mode="eval").body)
    return node


def _made_async(node: Any) -> Any:
    other = ast.FunctionDef if isinstance(node, ast.AsyncFunctionDef) else ast.AsyncFunctionDef
    parts = {name: getattr(node, name) for name in node._fields if hasattr(node, name)}
    return ast.copy_location(other(**parts), node)


def _made_generator(node: Any) -> Any:
    node.body = [*node.body, ast.parse("yield None").body[0]]
    return node


def _renamed_inside(node: Any, name: str) -> Any:
    """A function without a parameter, or a data class without a field, of this name."""
    if isinstance(node, ast.ClassDef):
        fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
        for one in fields:
            if isinstance(one.target, ast.Name) and one.target.id == name:
                one.target.id += "_v2"
        return node
    for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
        one.arg += "_v2" if one.arg == name else ""
    return node


# -- the ends -----------------------------------------------------------------------------------


class Trial:
    """A framework's seams, planned on the installed sources and on changed ones.

    Args:
        framework: as users write it.
    """

    def __init__(self, framework: str) -> None:
        self.adapter: Adapter = load(entries(third_party=False)[framework])
        self.settings = _settings.resolve(
            environ={}, frameworks=(framework,), known_frameworks=entries(third_party=False)
        )
        self.sources = Sources()
        self.before = self._plan({})
        self.places = list(self._places())

    def _plan(self, changed: Mapping[str, str | None]) -> SeamPlan:
        self.sources.changed = changed
        known = dict(_source._described)
        with looking_at(self.sources.find):
            try:
                had = missed(self.adapter)
                return check(self.adapter, self.settings.features, self.settings, had)
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

    def survivor(self, mutant: Mutant) -> str:
        """Why a change is not noticed; ``""`` if it is, or does no harm."""
        after = self._plan(mutant.make())
        told = [
            self._row_survives(mutant, row, after)
            for row in self.before.rows
            if row.seam.target == mutant.target
            and row.state in ("pending", "native")
            and not row.seam.refusal
            and mutant.concerns(row.seam)
        ]
        told += self._half(after)
        judged = any(
            mutant.kind == kind and re.search(pattern, f"{mutant.target}: {mutant.detail}")
            for kind, pattern, _ in JUDGED
        )
        return "" if judged else next(filter(None, told), "")

    def _row_survives(self, mutant: Mutant, row: Row, plan: SeamPlan) -> str:
        module = mutant.target.partition(":")[0]
        same = [one for one in plan.rows if one.seam is row.seam]
        if not same:
            # The plan may report another place or form of the symbol as missing.
            of_group = [one.reason for one in plan.rows if one.group == row.group]
            return "" if any(module in one for one in of_group) else "gone, and nothing says so"
        (after,) = same
        if after.state == "refused":
            # A cause in another symbol of the group counts too, if it names the changed module.
            return "" if module in after.reason else f"refused, unnamed: {after.reason}"
        if after.state in ("absent", "native"):
            return "" if after.reason else f"{after.state}, without a reason"
        return "still patched"

    def _half(self, plan: SeamPlan) -> Iterator[str]:
        """Groups that would be patched in part, because a part no longer exists."""
        left = {id(row.seam): row for row in plan.rows}
        groups: dict[Any, list[tuple[Row, Row | None]]] = {}
        for row in self.before.rows:
            if row.state == "pending" and not row.seam.refusal:
                groups.setdefault(row.group, []).append((row, left.get(id(row.seam))))
        for group, rows in groups.items():
            gone = [row for row, after in rows if after is None or after.state == "absent"]
            stay = [row for row, after in rows if after is not None and after.state == "pending"]
            if gone and stay:
                yield f"{group[1]}, {group[2]}: patched without {gone[0].seam.target}"


def hold(framework: str, share: int | None = SHARE) -> None:
    """Assert that a sample of changes is noticed.

    Args:
        framework: as users write it.
        share: how many changes, drawn by ``SEED``; ``None`` for all.
    """
    tested_version(load(entries(third_party=False)[framework]))
    trial = Trial(framework)
    made = [one for place in trial.places for one in place.mutants()]
    chosen = random.Random(SEED).sample(made, min(share or len(made), len(made)))
    left = [f"{one}: {told}" for one in chosen if (told := trial.survivor(one))]
    assert chosen
    assert not left, "\n".join(left)
