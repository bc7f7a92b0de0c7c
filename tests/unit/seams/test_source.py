"""``look`` describes a symbol from its file and imports nothing."""

from __future__ import annotations

import py_compile
import sys

import pytest

from precision_shim.seams import look

RICH = '''
import dataclasses
from dataclasses import dataclass


def plain(a, /, b, *rest, c=1, **more):
    """Mentions nothing."""
    return helper(b, keyword=a.attribute["string key"])


async def waits(a):
    pass


@dataclass(frozen=True)
class Config:
    exp_avg_dtype: str = ""
    count: int = 0
    PLAIN = 3

    def __post_init__(self):
        self.checked = True

    class Inner:
        def deep(self, x):
            pass


@dataclasses.dataclass
class Other:
    size: int


@dataclass
class Heir(Other, Unknown):
    more: int = 0


class NoData:
    size: int


if sys.platform == "nowhere":
    def chosen(old):
        pass
else:
    def chosen(new):
        pass

try:
    import fast
except ImportError:
    def fallback(slow):
        pass


def twice(first):
    pass


def twice(second):
    pass


assigned = plain
'''


@pytest.fixture
def rich(write_modules):
    write_modules({"toy/__init__.py": "raise AssertionError\n", "toy/rich.py": RICH})
    yield
    assert "toy" not in sys.modules


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("plain", ("a", "b", "c")),
        ("waits", ("a",)),
        ("Config.__post_init__", ("self",)),
        ("Config.__init__", ("exp_avg_dtype", "count")),
        ("Other.__init__", ("size",)),
        ("Heir.__init__", ("size", "more")),
        ("Config.Inner.deep", ("self", "x")),
        ("Config", ()),
        ("chosen", ("new",)),
        ("fallback", ("slow",)),
        ("twice", ("second",)),
    ],
)
def test_finds_parameters(rich, name, parameters):
    symbol = look(f"toy.rich:{name}")
    assert symbol.found
    assert symbol.module_found
    assert symbol.problem == ""
    assert symbol.parameters == parameters


@pytest.mark.parametrize("name", ["nothing", "assigned", "Config.nothing", "NoData.__init__"])
def test_says_what_is_not_there(rich, name):
    symbol = look(f"toy.rich:{name}")
    assert symbol.module_found
    assert not symbol.found
    assert f"toy.rich:{name} not found" in symbol.problem


def test_names_of_a_function_are_its_own(rich):
    names = look("toy.rich:plain").names
    assert {"helper", "keyword", "attribute", "string key", "rest", "more"} <= names
    assert "checked" not in names


def test_names_of_a_method_are_its_classs(rich):
    assert {"exp_avg_dtype", "checked", "deep"} <= look("toy.rich:Config.__post_init__").names
    assert "exp_avg_dtype" in look("toy.rich:Config.__init__").names
    assert "helper" not in look("toy.rich:Config.__post_init__").names


@pytest.mark.parametrize("module", ["nowhere", "nowhere.at.all", "toy.nowhere", "toy.rich.deeper"])
def test_a_module_that_is_not_there_is_not_found(rich, module):
    symbol = look(f"{module}:f")
    assert not symbol.module_found
    assert not symbol.found
    assert module in symbol.problem


def test_reads_namespace_packages_nested_ones_too(write_modules):
    write_modules(
        {
            "space/inner/deeper/ops.py": "def f(a):\n    pass\n",
            "space/ops.py": "def g(b):\n    pass\n",
            "toy/__init__.py": "",
            "toy/bare/ops.py": "def h(c):\n    pass\n",
        }
    )
    assert look("space.ops:g").parameters == ("b",)
    assert look("space.inner.deeper.ops:f").parameters == ("a",)
    assert look("toy.bare.ops:h").parameters == ("c",)
    assert not {"space", "space.inner", "toy", "toy.bare"} & set(sys.modules)


def test_a_namespace_package_spread_over_two_folders_is_searched_whole(
    write_modules, tmp_path, monkeypatch
):
    write_modules({"space/inner/a.py": ""})
    second = tmp_path / "second"
    (second / "space" / "inner").mkdir(parents=True)
    (second / "space" / "inner" / "b.py").write_text("def f(x):\n    pass\n")
    monkeypatch.syspath_prepend(second)
    assert look("space.inner.b:f").parameters == ("x",)
    assert look("space.inner.a:f").module_found


def test_a_package_without_source_cannot_be_looked_into(write_modules):
    root = write_modules({"toy/__init__.py": "", "toy/ops.py": "def f(a):\n    pass\n"})
    py_compile.compile(str(root / "toy/ops.py"), cfile=str(root / "toy/ops.pyc"))
    (root / "toy/ops.py").unlink()
    symbol = look("toy.ops:f")
    assert symbol.module_found
    assert not symbol.found
    assert "no readable source" in symbol.problem


def test_another_packages_broken_finder_is_a_problem_and_not_an_exception(rich, monkeypatch):
    class Broken:
        @staticmethod
        def find_spec(name, path=None, target=None):
            raise ZeroDivisionError("their fault")

    monkeypatch.setattr(sys, "meta_path", [Broken, *sys.meta_path])
    symbol = look("toy.rich:plain")
    assert not symbol.found
    assert "their fault" in symbol.problem


def test_looking_keeps_the_import_hooks_of_others(write_modules):
    """wrapt's own finder would import the parent, and lose the hooks of modules it imports."""
    import wrapt

    write_modules({"toy/__init__.py": "import toy.ops", "toy/ops.py": "def f(a):\n    pass\n"})
    seen = []
    wrapt.register_post_import_hook(lambda module: seen.append(module.__name__), "toy.ops")
    assert look("toy.ops:f").parameters == ("a",)
    assert "toy" not in sys.modules
    import toy

    assert seen == ["toy.ops"]
    assert toy
