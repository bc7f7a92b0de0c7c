"""Show the difference between two versions of a symbol's code as lines of a diff."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator

from precision_shim.process.digest import is_remark
from precision_shim.seams._source import Definition


def changed_lines(old: Definition, new: Definition) -> list[str]:
    """Return the removed (``-``) and added (``+``) lines, without comments and docstrings."""
    differences = difflib.unified_diff(_code(old), _code(new), lineterm="", n=0)
    return [line for line in differences if line[:3] not in ("---", "+++") and line[:2] != "@@"]


def _code(found: Definition) -> list[str]:
    node = found.node
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = found.text.split("\n")  # splitlines() also splits at a form feed, ast does not
    left_out: set[int] = set()
    inside: set[int] = set()
    for inner in ast.walk(node):
        if isinstance(inner, (ast.stmt, ast.expr)) and inner.end_lineno is not None:
            if is_remark(inner):
                left_out.update(range(inner.lineno, inner.end_lineno + 1))
            elif isinstance(inner, (ast.Constant, ast.JoinedStr)):
                inside.update(range(inner.lineno + 1, inner.end_lineno + 1))
    indent = len(lines[first - 1]) - len(lines[first - 1].lstrip())
    numbers = range(first, (node.end_lineno or first) + 1)
    return list(_code_lines(lines, numbers, left_out, inside, indent))


def _code_lines(
    lines: list[str], numbers: range, left_out: set[int], inside: set[int], indent: int
) -> Iterator[str]:
    """Yield the lines that have code or are inside a string other than a docstring."""
    for number in numbers:
        line = lines[number - 1].rstrip()
        bare = line.lstrip()
        if number in left_out:
            continue
        if number in inside or (bare and not bare.startswith("#")):
            yield line[indent:] if not line[:indent].strip() else line
