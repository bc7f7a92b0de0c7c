"""No module of ours imports, at its top level, one that imports it: read from the source."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import precision_shim
import precision_shim_adapters

ROOTS = [Path(one.__file__).parent for one in (precision_shim, precision_shim_adapters)]
FRAMEWORKS = ("verl", "skyrl", "nemo-rl", "nemo_rl", "torchtitan")
FILES = {
    ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for root in ROOTS
    for path in sorted(root.rglob("*.py"))
}


def at_import(body):
    """Statements that run when a module is imported, those for type checkers left out."""
    for line in body:
        if isinstance(line, ast.If) and ast.unparse(line.test).endswith("TYPE_CHECKING"):
            yield from at_import(line.orelse)
            continue
        yield line
        if isinstance(line, (ast.If, ast.Try, ast.With, ast.ClassDef)):
            for part in ("body", "orelse", "finalbody"):
                yield from at_import(getattr(line, part, ()))
            for handler in getattr(line, "handlers", ()):
                yield from at_import(handler.body)


def imports(name):
    """Names of our modules that a module imports."""
    path = FILES[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for line in at_import(ast.parse(path.read_text(encoding="utf-8")).body):
        if isinstance(line, ast.Import):
            found = [one.name for one in line.names]
        elif isinstance(line, ast.ImportFrom):
            above = package[: len(package) - line.level + 1] if line.level else []
            base = ".".join([*above, *([line.module] if line.module else [])])
            # ``from package import name``: a module of that name, or what the package holds.
            found = [
                full if (full := f"{base}.{one.name}") in FILES else base for one in line.names
            ]
        else:
            continue
        yield from (one for one in found if one in FILES and one != name)


def circle(graph):
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_module_imports_itself_by_way_of_others():
    graph = {name: set(imports(name)) for name in FILES}
    assert {"precision_shim.process.finders", "precision_shim.errors"} <= graph[
        "precision_shim.seams._engine"
    ]
    assert circle(graph) == []


def test_a_circle_would_be_found():
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}


def test_the_core_names_no_framework():
    """But for the tools that are made to run one: the CPU harness."""
    named = {
        f"{name}: {word}"
        for name, path in FILES.items()
        if name.startswith("precision_shim.") and not name.startswith("precision_shim.testing")
        for word in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(word, ast.Constant)
        and str(word.value).partition(".")[0] in FRAMEWORKS
        and " " not in str(word.value)
    }
    assert named == set()
