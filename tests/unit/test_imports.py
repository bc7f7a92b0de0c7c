"""Our modules have no import cycles: not within functions, nor for type checkers."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import precision_shim
import precision_shim_adapters
import precision_shim_tools

PACKAGES = (precision_shim, precision_shim_adapters, precision_shim_tools)
ROOTS = [Path(str(one.__file__)).parent for one in PACKAGES]
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
}
"""TransformerEngine's optimizer has attributes of these names, even without Megatron."""

FILES = {
    ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for root in ROOTS
    for path in sorted(root.rglob("*.py"))
}


BACKENDS = ("megatron", "torch_fp16", "agreement")
ADAPTERS = (
    *("verl", "skyrl", "nemo_rl", "torchtitan"),
    *("areal", "ms_swift", "roll", "slime", "miles"),
)
"""The packages of our adapters."""


def anywhere(body):
    """All statements of a file."""
    for line in body:
        yield from (one for one in ast.walk(line) if isinstance(one, ast.stmt))


@cache
def tree(name):
    return ast.parse(FILES[name].read_text(encoding="utf-8"))


@cache
def named(name):
    """Names of all modules that a module imports, ours or not, anywhere in its source."""
    path = FILES[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = []
    for line in anywhere(tree(name).body):
        if isinstance(line, ast.Import):
            found += [one.name for one in line.names]
        elif isinstance(line, ast.ImportFrom):
            above = package[: len(package) - line.level + 1] if line.level else []
            base = ".".join([*above, *([line.module] if line.module else [])])
            # In ``from package import name``, ``name`` may be a module or another object.
            found += [
                full if (full := f"{base}.{one.name}") in FILES else base for one in line.names
            ]
    return found


def graph():
    """Our modules that each of our modules imports."""
    return {name: {one for one in named(name) if one in FILES and one != name} for name in FILES}


def room(name):
    """The adapter or the backend that a module belongs to; ``""`` for any other module."""
    root, _, rest = name.partition(".")
    first = rest.partition(".")[0]
    return first if root == "precision_shim_adapters" and first in BACKENDS + ADAPTERS else ""


def circle(graph):
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_module_imports_itself_by_way_of_others():
    found = graph()
    assert "precision_shim.errors" in found["precision_shim.seams._engine"]
    assert circle(found) == []


def test_an_import_is_seen_wherever_it_stands():
    source = "def one():\n try:\n  pass\n except OSError:\n  with two:\n   import three\n"
    source += "if TYPE_CHECKING:\n import four\n"
    found = [ast.unparse(one) for one in anywhere(ast.parse(source).body)]
    assert {"import three", "import four"} <= set(found)
    assert "precision_shim.process.session" in graph()["precision_shim.process.startup"]
    assert "precision_shim.auditing.record" in graph()["precision_shim.reporting.record"]


def test_no_adapter_imports_another_frameworks():
    crossing = {
        (name, other)
        for name, others in graph().items()
        for other in others
        if room(other) in ADAPTERS and room(name) not in ("", room(other))
    }
    assert crossing == set()


def test_an_adapter_imports_what_adapting_has_and_the_errors():
    found = {
        (name, other)
        for name in FILES
        if room(name) in ADAPTERS
        for other in named(name)
        if other.partition(".")[0] == "precision_shim"
    }
    assert ("precision_shim_adapters.slime.adapter", "precision_shim.adapting") in found
    allowed = re.compile(r"precision_shim\.(errors|adapting(\.\w+)?)")
    assert [one for one in found if not allowed.fullmatch(one[1])] == []


def test_the_backends_import_no_adapter_and_each_other_in_no_circle():
    found = {backend: set() for backend in BACKENDS}
    for name, others in graph().items():
        if room(name) in BACKENDS:
            found[room(name)] |= {room(other) for other in others} - {"", room(name)}
    assert not set().union(*found.values()) - set(BACKENDS)
    assert circle(found) == []


def test_one_module_of_the_core_imports_the_adapters():
    """The test includes imports within functions and for type checkers."""
    found = {
        name
        for name in FILES
        if name.partition(".")[0] == "precision_shim"
        for one in named(name)
        if one.partition(".")[0] == "precision_shim_adapters"
    }
    assert found == {"precision_shim.process.registry"}


TOOLS_OF_THE_CORE = {
    "precision_shim.__main__": "the command line",
    "precision_shim.testing": "the public name of a tool",
}
"""The modules that a worker may load and that import a tool, each with the occasion."""


NETWORK = re.compile(
    r"(_?socket|_?ssl|asyncio|http|urllib\.request|urllib3|xmlrpc|ftplib|smtplib|poplib|imaplib"
    r"|requests|httpx|aiohttp|grpc|zmq|fsspec|boto3|torch\.hub)(\.|$)"
)


def test_no_module_imports_what_opens_a_network_connection():
    """As docs/security.md says."""
    imported = {one for name in FILES for one in named(name)}
    assert {"json", "precision_shim.errors"} <= imported
    assert not [one for one in imported if NETWORK.match(one)]


def test_what_a_worker_runs_imports_no_tool():
    found = {
        name
        for name in FILES
        if not name.startswith("precision_shim_tools")
        for one in named(name)
        if one.partition(".")[0] == "precision_shim_tools"
    }
    assert found == set(TOOLS_OF_THE_CORE)


def test_the_core_names_no_framework():
    named = {
        f"{name}: {word}"
        for name in FILES
        if name.startswith("precision_shim.")
        for word in ast.walk(tree(name))
        if isinstance(word, ast.Constant)
        and str(word.value).partition(".")[0] in FRAMEWORKS
        and " " not in str(word.value)
    }
    assert named == set()


def test_the_core_names_no_field_of_megatrons_config():
    """The backend provides all that the core reads, shows or advises about the config's fields."""
    found = {
        (name, field)
        for name in FILES
        if name.startswith("precision_shim.")
        for word in ast.walk(tree(name))
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
