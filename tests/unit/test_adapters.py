"""The adapters' lists of seams."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

import pytest

from precision_shim.process import registry
from precision_shim.seams import Seam
from precision_shim.seams._later import Later, read_record
from precision_shim.seams._plan import fact_of

from ..environments.record_seams import record_of
from ..processes.commands import python

ADAPTERS = ("verl", "skyrl", "nemo_rl", "torchtitan", "areal", "ms_swift")

NO_LOOK = """
import importlib, sys
import precision_shim.seams._source as source
import precision_shim.process.session, precision_shim.adapting

def refuse(*args, **kwargs):
    raise AssertionError("looked while the adapter was imported")

for module in list(sys.modules.values()):
    if getattr(module, "__name__", "").startswith("precision_shim"):
        for name in ("look", "find_spec"):
            if getattr(module, name, None) is getattr(source, name):
                setattr(module, name, refuse)

for name in sys.argv[1:]:
    print(name, len(importlib.import_module(f"precision_shim_adapters.{name}.adapter").SEAMS))
"""


def test_an_adapters_list_is_the_same_on_every_machine():
    """An adapter's seams are only declarations: importing the adapter inspects nothing."""
    pytest.importorskip("torch")
    pytest.importorskip("wrapt")
    done = python("-W", "ignore", "-c", NO_LOOK, *ADAPTERS)
    assert done.returncode == 0, done.stderr
    listed = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, _ in listed] == list(ADAPTERS)
    assert all(int(count) > 20 for _, count in listed)


OURS = registry.entries(third_party=False)


@pytest.mark.parametrize("name", OURS)
def test_the_record_of_seams_is_current_and_says_what_the_table_says(name):
    pytest.importorskip("torch")
    entry = OURS[name]
    text, file = record_of(entry), registry.record_file(entry.place)
    assert file is not None
    there = file.read_text(encoding="utf-8") if file.exists() else ""
    assert there == text, "not current: python tests/environments/record_seams.py"
    if name in ("slime", "miles"):  # which make their wrappers in functions
        assert text == ""
        return
    module = entry.place.partition(":")[0]
    table, read = sys.modules[module].SEAMS, read_record(text, registry.source_of_adapters())
    assert read is not None
    for one, other in zip(table, read, strict=True):
        for field in {one.name for one in fields(Seam)} - {"wrapper", "native"}:
            assert getattr(one, field) == getattr(other, field)
        assert (one.key, one.reads, fact_of(one)) == (other.key, other.reads, fact_of(other))


LOADED = """
import sys
from precision_shim.process.registry import entries, load
seams = load(entries()["verl"]).seams
print(len(seams), *sorted({"torch", "precision_shim_adapters.verl.config"} & {*sys.modules}))
found = next(one for one in seams if one.native and "native_fields" in one.native.__qualname__)
print(found.native(type("Symbol", (), {"parameters": ()}), None), "torch" in sys.modules)
"""


def test_a_seam_is_listed_without_its_function_whose_call_imports_it():
    pytest.importorskip("torch")
    done = python("-W", "ignore", "-c", LOADED)
    assert done.returncode == 0, done.stderr
    listed, called = done.stdout.splitlines()
    assert int(listed) > 100
    assert called == "None True"


@pytest.mark.parametrize("broken", [None, "{", "[]", '{"source": "another"}'])
def test_without_a_record_of_this_source_the_table_is_imported(tmp_path, monkeypatch, broken):
    pytest.importorskip("torch")
    place = OURS["torchtitan"].place
    monkeypatch.delitem(sys.modules, place.partition(":")[0], raising=False)
    assert isinstance(registry.load(OURS["torchtitan"]).seams[0].wrapper, Later)
    file = tmp_path / "seams.json"
    if broken is not None:
        file.write_text(broken)
    monkeypatch.setattr(registry, "record_file", lambda place: Path(file))
    assert not isinstance(registry.load(OURS["torchtitan"]).seams[0].wrapper, Later)
