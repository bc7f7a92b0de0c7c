"""The watcher reports imports, finds no module itself, and leaves no trace."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import threading
from importlib.machinery import PathFinder

import pytest

from precision_shim.process.finders import Watcher


@pytest.fixture
def watch(write_modules):
    """Return a function that watches names and returns the list of reported names."""
    made = []
    before = list(sys.meta_path)

    def start(*names, when=None, before=False):
        seen = []

        def report(name):
            seen.append(name)
            if when is not None:
                when(name)

        watcher = Watcher(report, before=before)
        watcher.watch(names)
        made.append(watcher)
        return seen

    yield start
    for watcher in made:
        watcher.remove()
    assert sys.meta_path == before


MODULES = {"toy/__init__.py": "", "toy/ops.py": "READY = True\n"}


def test_reports_once_the_modules_code_has_run(watch, write_modules):
    write_modules(MODULES)
    ready = []
    seen = watch("toy.ops", when=lambda name: ready.append(sys.modules[name].READY))
    assert importlib.import_module("toy.ops").READY
    assert importlib.import_module("toy.ops")
    assert seen == ["toy.ops"]
    assert ready == [True]


def test_reports_before_there_is_a_module_and_once(watch, write_modules):
    write_modules(MODULES)
    there = []
    seen = watch("toy.ops", before=True, when=lambda name: there.append(name in sys.modules))
    assert importlib.util.find_spec("toy.ops").origin.endswith("ops.py")
    assert seen == []  # a look wakes nobody
    ops = importlib.import_module("toy.ops")
    importlib.reload(ops)
    assert (seen, there) == (["toy.ops"], [False])
    assert ops.__loader__ is ops.__spec__.loader
    assert type(ops.__loader__).__name__ == "SourceFileLoader"


def test_one_that_is_put_in_place_by_a_report_before_reports_too(watch, write_modules):
    write_modules(MODULES)
    later = []
    watch("toy.ops", before=True, when=lambda name: later.append(watch(name)))
    assert importlib.import_module("toy.ops")
    assert later == [["toy.ops"]]


def test_a_namespace_package_is_reported_before(watch, write_modules):
    write_modules({"space/ops.py": "", **MODULES})
    seen = watch("space", before=True)
    assert importlib.import_module("space.ops")
    assert seen == ["space"]


def test_the_module_has_its_own_loader_while_its_code_runs(watch, write_modules):
    write_modules(
        {
            **MODULES,
            "toy/ops.py": "SEEN = type(__spec__.loader).__name__, type(__loader__).__name__\n",
        }
    )
    watch("toy.ops")
    ops = importlib.import_module("toy.ops")
    assert ops.SEEN == ("SourceFileLoader", "SourceFileLoader")
    assert ops.__loader__ is ops.__spec__.loader


def test_a_module_that_does_not_exist_fails_as_without_us(watch, write_modules):
    write_modules(MODULES)
    seen = watch("toy.nowhere")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'toy\.nowhere'"):
        importlib.import_module("toy.nowhere")
    assert seen == []


def test_removal_makes_no_import_pass_over_a_finder(watch, write_modules):
    """As when ``uninstall()`` comes while another thread's import asks the finders in turn."""
    write_modules(MODULES)
    finders = sys.meta_path
    watcher = Watcher(lambda name: None)

    class Slow:
        @staticmethod
        def find_spec(name, path=None, target=None):
            watcher.remove()

    finders.insert(finders.index(PathFinder), Slow)  # PathFinder finds the module
    watcher.watch(["elsewhere"])
    try:
        assert importlib.import_module("toy.ops").READY
    finally:
        sys.meta_path = finders
        finders.remove(Slow)
        if watcher in finders:
            finders.remove(watcher)


def test_looking_for_a_spec_reports_nothing(watch, write_modules):
    write_modules(MODULES)
    seen = watch("toy.ops")
    assert importlib.util.find_spec("toy.ops").origin.endswith("ops.py")
    assert seen == []
    assert importlib.import_module("toy.ops")
    assert seen == ["toy.ops"]


def test_the_module_of_dash_m_runs_as_without_us(watch, write_modules):
    root = write_modules({**MODULES, "toy/__main__.py": "print(__name__)\n"})
    code = f"""
import runpy, sys
sys.path.insert(0, {str(root)!r})
from precision_shim.process.finders import Watcher
seen = []
Watcher(seen.append).watch(["toy", "toy.__main__"])
runpy.run_module("toy", run_name="__main__")
assert seen == ["toy"], seen
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "__main__\n"


def test_two_threads_that_import_one_module_get_one_report(watch, write_modules):
    write_modules({**MODULES, "toy/ops.py": "import time\ntime.sleep(0.05)\n"})
    seen = watch("toy.ops")
    threads = [
        threading.Thread(target=importlib.import_module, args=("toy.ops",)) for _ in range(8)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert seen == ["toy.ops"]
