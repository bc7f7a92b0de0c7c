"""Compares docs/versions.md with the places where a framework's own code steps or makes gradients.

The installed source determines these places: calls of ``backward``, of an optimizer's ``step`` or
``update``, of ``autograd.grad`` and its like in JAX, and every mention of a ``GradScaler``. The
page states for each place what the shim does there. A place that a new release adds is missing on
the page, and the test fails.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from precision_shim.process.registry import entries, load

from .versions_in_docs import PAGE, column

HARMLESS = re.compile(r"(schedulers?|prof|profiler|env|engine|stream|Logic)$")
"""Names of objects whose ``step`` does not train; a pipeline's schedule is none of them."""

SKIPPED = {"tests", "benchmarks", "scripts"}
"""Directories that no training imports."""


def places(framework: str) -> set[str]:
    """Each place as ``"module:function"``, without the name of the package."""
    found = set()
    for package in entries(third_party=False)[framework].packages:
        spec = importlib.util.find_spec(package)
        for root in map(Path, (spec.submodule_search_locations if spec else None) or ()):
            for file in sorted(root.rglob("*.py")):
                parts = file.relative_to(root).with_suffix("").parts
                if SKIPPED.isdisjoint(parts):
                    tree = ast.parse(file.read_text(encoding="utf-8"))
                    found |= {f"{'.'.join(parts)}:{name}" for name in _within(tree, ())}
    return found


def _within(node: ast.AST, names: tuple[str, ...]) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _within(child, (*names, child.name))
            continue
        if _trains(child):
            yield ".".join(names) or "(module)"
        yield from _within(child, names)


def _trains(node: ast.AST) -> bool:
    if isinstance(node, ast.Name | ast.Attribute | ast.alias):
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
        return "GradScaler" in (name or getattr(node, "name", ""))
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    method, owner = node.func.attr, ast.unparse(node.func.value).rpartition(".")[2]
    return (
        method in ("backward", "value_and_grad")
        or (method == "step" and not HARMLESS.search(owner))
        or (method == "grad" and owner in ("autograd", "jax"))
        or (method == "update" and owner == "optimizer")
    )


def read(framework: str) -> tuple[str, dict[str, str]]:
    """The version that the page lists, and its places with what the shim does at each."""
    page = PAGE.read_text(encoding="utf-8")
    block = re.search(f"<!-- steps:{framework} (\\S+) -->(.*?)<!-- /steps -->", page, re.DOTALL)
    assert block, f"docs/versions.md has no places of {framework}"
    rows = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in block[2].splitlines()
        if line.startswith("| `")
    )
    return block[1], {
        place: does for names, _, does in rows for place in re.findall(r"`([^`]+)`", names)
    }


def hold(framework: str) -> None:
    """Assert that the page lists the installed version's places and states what holds for each."""
    version, told = read(framework)
    installed, words = column(framework)
    newest = load(entries(third_party=False)[framework]).tested[-1]
    if installed != newest:
        pytest.skip(f"the page lists the places of {framework} {newest}, the newest")
    assert version == newest, f"docs/versions.md lists the places of {framework} {version}"
    found = places(framework)
    assert told.keys() == found, {
        "not on the page": sorted(found - told.keys()),
        "gone": sorted(told.keys() - found),
    }
    for place, does in told.items():
        verb, _, path = does.partition(": ")
        word = words.get(("fp16-scaling", path), "")
        if verb == "scaled":
            assert word.startswith("yes"), (place, does)
        elif verb == "refused":
            own_loop = path == "as every trainer with a loop of its own"
            assert word == "refused" or own_loop, (place, does)
        else:
            assert verb in ("nothing", "not patched"), (place, does)


if __name__ == "__main__":
    import sys

    print("\n".join(sorted(places(sys.argv[1]))))
