"""Our modules have no import cycles, not even within functions, as the source shows."""

from __future__ import annotations

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import precision_shim
import precision_shim_adapters

ROOTS = [Path(one.__file__).parent for one in (precision_shim, precision_shim_adapters)]
FRAMEWORKS = ("verl", "skyrl", "nemo-rl", "nemo_rl", "torchtitan", "areal", "swift")
FIELDS = (
    "use_precision_aware_optimizer",
    "main_grads_dtype",
    "main_params_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "store_param_remainders",
    "params_dtype",
    "use_distributed_optimizer",
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    "overlap_cpu_optimizer_d2h_h2d",
    "fp8_recipe",
    "grad_reduce_in_fp32",
    "check_for_nan_in_grad",
)
"""Fields of Megatron's OptimizerConfig and of DDP's config."""

OF_FUSED_ADAM = {
    ("precision_shim.auditing.torch_reader", "exp_avg_dtype"),
    ("precision_shim.auditing.torch_reader", "exp_avg_sq_dtype"),
    ("precision_shim.auditing.torch_reader", "store_param_remainders"),
    ("precision_shim.precision.remainders", "store_param_remainders"),
    ("precision_shim.updates.rules", "store_param_remainders"),
}
"""TransformerEngine's optimizer has attributes of these names, even without Megatron."""

FILES = {
    ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for root in ROOTS
    for path in sorted(root.rglob("*.py"))
}


CLOSING = {
    # The start-up code waits for a framework before it imports and starts the session.
    ("precision_shim.process.startup", "precision_shim.process.session"),
    # A status is printed as text, and the text is made from the record.
    ("precision_shim.reporting.record", "precision_shim.reporting.text"),
}
"""Pairs of modules, of which the first imports the second within a function. The second imports the
first at its top, or through other modules (``session`` also through ``journal``)."""


def at_import(body):
    """Statements that run when a module is imported, without those for type checkers."""
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


def when_run(body):
    """All statements of a file, without those for type checkers."""
    for line in body:
        if isinstance(line, ast.If) and ast.unparse(line.test).endswith("TYPE_CHECKING"):
            yield from when_run(line.orelse)
            continue
        yield line
        for part in ast.iter_child_nodes(line):
            if isinstance(part, (ast.ExceptHandler, ast.match_case)):
                yield from when_run(part.body)
        yield from when_run(
            [one for one in ast.iter_child_nodes(line) if isinstance(one, ast.stmt)]
        )


def anywhere(body):
    """All statements of a file."""
    for line in body:
        yield from (one for one in ast.walk(line) if isinstance(one, ast.stmt))


def named(name, lines=at_import):
    """Names of all modules that a module imports, ours or not."""
    path = FILES[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for line in lines(ast.parse(path.read_text(encoding="utf-8")).body):
        if isinstance(line, ast.Import):
            yield from (one.name for one in line.names)
        elif isinstance(line, ast.ImportFrom):
            above = package[: len(package) - line.level + 1] if line.level else []
            base = ".".join([*above, *([line.module] if line.module else [])])
            # In ``from package import name``, ``name`` may be a module or another object.
            yield from (
                full if (full := f"{base}.{one.name}") in FILES else base for one in line.names
            )


def imports(name, lines=at_import):
    """Names of our modules that a module imports."""
    yield from (one for one in named(name, lines) if one in FILES and one != name)


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


def test_no_function_closes_a_circle_but_those_that_are_named():
    graph = {name: set(imports(name, when_run)) for name in FILES}
    for name, other in CLOSING:
        assert other in graph[name] - set(imports(name)), (name, other)
        graph[name].discard(other)
    assert circle(graph) == []
    for name, other in CLOSING:  # each exception must close a cycle
        assert circle({**graph, name: {*graph[name], other}}), (name, other)


def test_an_import_within_a_function_is_seen():
    source = "def one():\n try:\n  pass\n except OSError:\n  with two:\n   import three\n"
    source += "if TYPE_CHECKING:\n import four\n"
    found = [ast.unparse(one) for one in when_run(ast.parse(source).body)]
    assert "import three" in found
    assert "import four" not in found


def test_a_circle_would_be_found():
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}


def test_one_module_of_the_core_imports_the_adapters():
    """The test includes imports within functions and for type checkers."""
    found = {
        name
        for name in FILES
        if name.partition(".")[0] == "precision_shim"
        for one in named(name, anywhere)
        if one.partition(".")[0] == "precision_shim_adapters"
    }
    assert found == {"precision_shim.process.registry"}


def test_the_core_names_no_framework():
    """The only exception is the CPU harness, whose tools run frameworks."""
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


def test_the_core_names_no_field_of_megatrons_config():
    """The backend provides all that the core reads, shows or advises about the config's fields."""
    found = {
        (name, field)
        for name, path in FILES.items()
        if name.startswith("precision_shim.")
        and not name.startswith(("precision_shim.testing", "precision_shim.cli.demo"))
        for word in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(word, (ast.Constant, ast.Attribute, ast.keyword))
        for field in FIELDS
        if re.search(rf"\b{field}\b", text_of(word))
    }
    assert found == OF_FUSED_ADAM


def text_of(word):
    """A string's text, or the name of an attribute or of a keyword."""
    if isinstance(word, ast.Constant):
        return str(word.value)
    return word.attr if isinstance(word, ast.Attribute) else word.arg or ""
