"""Compute a digest of a symbol's code that does not depend on comments or the Python version.

It hashes the fields of the syntax tree that affect behaviour, not positions, docstrings and
annotations. ``ast.dump`` differs between Python versions.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from ..seams._source import definition

_NOT_READ = {
    "ctx",  # A node's position in the tree determines ``ctx`` (load or store).
    "kind",  # ``kind`` distinguishes u"" from "", which are equal.
    "annotation",
    "returns",
    "type_comment",
    "type_ignores",
    "type_params",  # ``type_params`` exists since Python 3.12, for annotations only.
}
_Scope = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def digest(target: str) -> str:
    """Return the SHA-256 of a symbol's code, in hexadecimal; ``""`` if the symbol is not found.

    A dataclass's generated ``__init__`` has the digest of the class.
    """
    node = definition(target)
    return digest_of(node.node) if node is not None else ""


def digest_of(node: ast.AST) -> str:
    """Return the SHA-256 of a syntax tree, in hexadecimal."""
    hashed = hashlib.sha256()
    for word in _walk(node, isinstance(node, ast.ClassDef)):
        hashed.update(word.encode("utf-8", "surrogatepass"))
        hashed.update(b"\0")
    return hashed.hexdigest()


def is_remark(line: ast.AST) -> bool:
    """Whether a statement is only a string, such as a function's or a field's docstring."""
    return (
        isinstance(line, ast.Expr)
        and isinstance(line.value, ast.Constant)
        and isinstance(line.value.value, str)
    )


def _walk(node: ast.AST, in_class: bool) -> Iterator[str]:
    """Yield the strings to hash for a syntax-tree node; brackets keep different trees distinct.

    An annotation without a value is left out, unless it declares a class's field.
    """
    if isinstance(node, ast.AnnAssign) and not in_class:
        if node.value is None:
            return
        node = ast.Assign(targets=[node.target], value=node.value)
    if isinstance(node, _Scope):
        in_class = isinstance(node, ast.ClassDef)
    yield f"({type(node).__name__}"
    if isinstance(node, ast.Constant):
        yield f"{type(node.value).__name__} {node.value!r}"
    elif isinstance(node, ast.JoinedStr):
        yield from _f_string(node, in_class)
    else:
        for name in node._fields:
            if name not in _NOT_READ:
                yield from _field(name, getattr(node, name, None), in_class)
    yield ")"


def _field(name: str, value: Any, in_class: bool) -> Iterator[str]:
    if value is None or value == []:
        return  # newer Pythons add fields, which are empty for code of older Pythons
    yield name
    if isinstance(value, ast.AST):
        yield from _walk(value, in_class)
    elif isinstance(value, list):
        yield "["
        for item in value:
            if isinstance(item, ast.AST):
                if not is_remark(item):
                    yield from _walk(item, in_class)
            else:  # no node: None (Dict.keys, arguments.kw_defaults) or a name (Global.names)
                yield repr(item)
        yield "]"
    else:
        yield repr(value)


def _f_string(node: ast.JoinedStr, in_class: bool) -> Iterator[str]:
    """Yield an f-string's strings to hash; join adjacent text, as Pythons split it differently."""
    for is_text, parts in groupby(_parts(node.values), lambda part: isinstance(part, str)):
        if not is_text:
            for part in parts:
                yield from _walk(part, in_class)
        elif text := "".join(parts):
            yield f"str {text!r}"


def _parts(values: Iterable[ast.AST]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, ast.Constant):
            yield str(value.value)
        elif isinstance(value, ast.JoinedStr):
            yield from _parts(value.values)
        else:
            yield value
