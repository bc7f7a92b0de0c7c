"""Describe a symbol from its source file, without importing the module or the module's parents.

``look`` reads the installed packages; inside ``with looking_at(...)`` it reads another ``Source``.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.machinery import ModuleSpec
from typing import Any, NamedTuple

from ..holding import holding

_Function = (ast.FunctionDef, ast.AsyncFunctionDef)
_LATER = ("context manager", "coroutine", "generator")  # they end after their call returns
KINDS = ("", "class", "property", "staticmethod", "classmethod", *_LATER)
"""Values of ``Symbol.kind``."""
_PROPERTIES = {"property", "cached_property"}
_CONTEXTS = {"contextmanager", "asynccontextmanager"}
_NAMING = ("id", "attr", "arg", "name")
"""Fields of syntax nodes that contain an identifier."""

_described: dict[str, tuple[int, Symbol]] = {}
"""Caches, for each target, the hash of the module's source and the symbol in that source."""


@dataclass(frozen=True)
class Symbol:
    """A symbol's description, read from source.

    Attributes:
        target: ``"module:attribute"``.
        module_found: whether the module's file was found.
        found: whether the symbol is defined in the module's file.
        parameters: names of the parameters; for a dataclass's ``__init__`` all its fields.
        positional: the parameters of a function that may be passed by position.
        defaults: a function's defaults that are written as literals.
        names: identifiers and string constants in the source of the symbol, or of a method's class.
        problem: why the symbol cannot be described, or ``""``.
        kind: one of ``KINDS``; ``""`` for a plain function or method.
    """

    target: str
    module_found: bool = False
    found: bool = False
    parameters: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()
    problem: str = ""
    positional: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)
    kind: str = ""


Reader = Callable[[], "str | None"]
"""Reads a module's source; returns ``None`` for a module without source."""

Source = Callable[[str], "Reader | None"]
"""Maps a module's name to its ``Reader``, or to ``None`` if there is no such module."""


def installed(module: str) -> Reader | None:
    """The ``Source`` of all modules that this process could import."""
    spec = find_spec(module)
    if spec is None:
        return None
    get_source = getattr(spec.loader, "get_source", None)
    return lambda: get_source(module) if get_source is not None else None


_source: ContextVar[Source] = ContextVar("precision_shim_source", default=installed)


def looking_at(source: Source) -> AbstractContextManager[None]:
    """Context manager in which ``look`` reads this source instead of the installed packages."""
    return holding(_source, source)


def find_spec(name: str) -> ModuleSpec | None:
    """Find a module's spec without importing its parents (``importlib.util`` imports them).

    Our finders are skipped, because a lookup must not load an adapter; wrapt's, because they would
    import the parents, and drop the hooks of a module that a parent imports.
    """
    path: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        full = ".".join(parts[:depth])
        loaded = sys.modules.get(full)
        spec = getattr(loaded, "__spec__", None)
        if spec is None:
            for finder in list(sys.meta_path):
                if not hasattr(finder, "find_spec") or _only_watches(finder):
                    continue
                try:
                    spec = finder.find_spec(full, path)
                except KeyError:  # a namespace package whose parent is not imported
                    spec = _namespace(full, path or ())
                if spec is not None:
                    break
        if spec is None:
            return None
        locations = getattr(loaded, "__path__", None) or spec.submodule_search_locations
        path = list(locations) if locations is not None else []
    return spec


def _only_watches(finder: object) -> bool:
    return getattr(finder, "finds_nothing", False) or type(finder).__name__ == "ImportHookFinder"


def _namespace(name: str, path: Sequence[str]) -> ModuleSpec | None:
    from pkgutil import get_importer

    places: list[str] = []
    for entry in path:
        finder = get_importer(entry)
        found = finder.find_spec(name) if finder is not None else None
        if found is not None:
            places += found.submodule_search_locations or ()
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = places
    return spec if places else None


def source_digest(module: str) -> str:
    """Return the SHA-256 of a module's source, in hexadecimal; ``""`` if it cannot be read."""
    try:
        read = _source.get()(module)
        text = read() if read is not None else None
    except Exception:  # look() reports the error
        text = None
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest() if text else ""


def look(target: str) -> Symbol:
    """Describe the symbol ``"module:attribute"`` from source, importing nothing."""
    module, _, attribute = target.partition(":")
    try:
        read = _source.get()(module)
    except Exception as error:  # another package's finder may raise any error
        return Symbol(target, problem=f"looking for {module} failed: {error!r}")
    if read is None:
        return Symbol(target, problem=f"module {module} not found")
    try:
        text = read()
        if text is None:
            return Symbol(target, True, problem=f"module {module} has no readable source")
        hashed, symbol = _described.get(target, (None, None))
        if symbol is None or hashed != hash(text):
            symbol = _describe(target, _parse(text), attribute.split("."))
            _described[target] = hash(text), symbol
    except Exception as error:
        return Symbol(target, True, problem=f"source of {module} not readable: {error!r}")
    return symbol


class Definition(NamedTuple):
    """A symbol's syntax tree (a generated ``__init__`` has its class's) and the module's source."""

    node: ast.AST
    text: str


def definition(target: str) -> Definition | None:
    """Return the definition of a symbol; ``None`` if ``look`` does not find the symbol."""
    module, _, attribute = target.partition(":")
    read = _source.get()(module) if look(target).found else None
    text = read() if read is not None else None
    if text is None:
        return None
    scope: ast.AST = _parse(text)
    for part in attribute.split("."):
        scope = _member(scope, part) or scope  # for a generated __init__, the tree of its class
    return Definition(scope, text)


@lru_cache(maxsize=32)
def _parse(source: str) -> ast.Module:
    return ast.parse(source)


def drop_trees() -> None:
    """Free the syntax trees of all modules read so far; a large module's takes megabytes."""
    _parse.cache_clear()
    _names.cache_clear()


def _describe(target: str, tree: ast.Module, parts: list[str]) -> Symbol:
    scope: ast.AST = tree
    owner: ast.AST | None = None
    for position, part in enumerate(parts):
        inner = _member(scope, part)
        if inner is None:
            last = position == len(parts) - 1
            if last and part == "__init__" and _is_dataclass(scope):
                return Symbol(target, True, True, _fields(scope, tree), _names(scope))
            return Symbol(target, True, problem=f"{target} not found: no {part!r} there")
        owner, scope = scope, inner
    names = _names(owner if isinstance(owner, ast.ClassDef) else scope)
    if not isinstance(scope, _Function):
        return Symbol(target, True, True, names=names, kind="class")
    positional = tuple(argument.arg for argument in (*scope.args.posonlyargs, *scope.args.args))
    return Symbol(
        target,
        True,
        True,
        (*positional, *(argument.arg for argument in scope.args.kwonlyargs)),
        names,
        positional=positional,
        defaults=dict(_defaults(scope)),
        kind=_kind(scope),
    )


def _kind(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    decorators = _decorators(node)
    if decorators & _PROPERTIES:
        return "property"
    if decorators & _CONTEXTS:
        return "context manager"
    if isinstance(node, ast.AsyncFunctionDef):
        return "coroutine"
    pending: list[ast.AST] = list(node.body)
    while pending:
        inner = pending.pop()
        if isinstance(inner, (ast.Yield, ast.YieldFrom)):
            return "generator"
        if not isinstance(inner, (*_Function, ast.Lambda, ast.ClassDef)):
            pending += ast.iter_child_nodes(inner)
    return next((kind for kind in ("staticmethod", "classmethod") if kind in decorators), "")


def _defaults(scope: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, Any]]:
    positional = [*scope.args.posonlyargs, *scope.args.args]
    by_position = zip(reversed(positional), reversed(scope.args.defaults), strict=False)
    by_name = zip(scope.args.kwonlyargs, scope.args.kw_defaults, strict=True)
    for argument, value in (*by_position, *by_name):
        with suppress(ValueError):  # literal_eval() accepts only literal defaults.
            if value is not None:  # A keyword-only parameter without a default has None here.
                yield argument.arg, ast.literal_eval(value)


def _member(scope: ast.AST, name: str) -> ast.AST | None:
    # At run time the last definition of a name is in effect, which may be inside if, try or with.
    member: ast.AST | None = None
    pending = list(getattr(scope, "body", ()))
    while pending:
        node = pending.pop(0)
        if isinstance(node, (*_Function, ast.ClassDef)):
            if node.name == name:
                member = node
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            handled = [line for one in getattr(node, "handlers", ()) for line in one.body]
            pending[:0] = [*node.body, *getattr(node, "orelse", ()), *handled]
    return member


def _is_dataclass(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and "dataclass" in _decorators(node)


def _decorators(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> set[str]:
    names = (ast.unparse(decorator).partition("(")[0] for decorator in node.decorator_list)
    return {name.rpartition(".")[2] for name in names}


def _fields(node: ast.AST, tree: ast.Module) -> tuple[str, ...]:
    names = (base.id for base in getattr(node, "bases", ()) if isinstance(base, ast.Name))
    bases = (_member(tree, name) for name in names)
    inherited = [name for base in bases if base not in (None, node) for name in _fields(base, tree)]
    own = [
        line.target.id
        for line in getattr(node, "body", ())
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    ]
    return tuple(dict.fromkeys((*inherited, *own)))


@lru_cache(maxsize=32)  # all seams of one class need the names of that class
def _names(node: ast.AST) -> frozenset[str]:
    names: set[str] = set()
    for inner in ast.walk(node):
        keys = ("value",) if isinstance(inner, ast.Constant) else _NAMING
        names.update(value for key in keys if isinstance(value := getattr(inner, key, None), str))
    return frozenset(names)
