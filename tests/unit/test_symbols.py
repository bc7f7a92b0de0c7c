"""The record of digests: additions, comparisons, and the report on an untested version."""

from __future__ import annotations

import json

import pytest

from precision_shim.process import symbols as _symbols
from precision_shim.process.framework import Adapter
from precision_shim.process.symbols import equal_version, read_symbols, versions_of
from precision_shim.seams import Seam

from ..environments.symbol_record import add, write


def made(*versions):
    """A record of one distribution, made from versions and their symbols' digests."""
    record = {}
    for version, digests in versions:
        add(record, "toy", version, digests)
    return record


THREE = (("0.9.0", {"a": "1", "b": "1"}), ("0.10.0", {"a": "1", "b": "2", "c": "1"}))


def test_versions_are_kept_by_digest_the_oldest_first(tmp_path):
    record = made(*THREE)
    write(record, tmp_path / "symbols.json")
    assert json.loads((tmp_path / "symbols.json").read_text()) == {
        "toy": {
            "a": {"1": ["0.9.0", "0.10.0"]},
            "b": {"1": ["0.9.0"], "2": ["0.10.0"]},
            "c": {"1": ["0.10.0"]},
        }
    }
    assert versions_of(record, "toy") == ["0.9.0", "0.10.0"]


def test_what_is_recorded_again_is_replaced():
    record = made(*THREE, ("0.10.0", {"a": "9", "b": "1", "c": ""}))
    assert record == {
        "toy": {"a": {"1": ["0.9.0"], "9": ["0.10.0"]}, "b": {"1": ["0.9.0", "0.10.0"]}}
    }
    add(record, "toy", "0.9.0+cu130", {"a": "", "b": ""})
    add(record, "toy", "0.10.0", {"a": "", "b": ""})
    assert record == {}


@pytest.mark.parametrize(
    ("digests", "version"),
    [
        ({"a": "1", "b": "2", "c": "1"}, "0.10.0"),
        ({"a": "1", "b": "1", "c": ""}, "0.9.0"),
        ({"a": "1", "b": "7", "c": "1"}, ""),
        ({"a": "1", "b": "2", "c": ""}, ""),
        ({"a": "1", "b": "2", "c": "1", "d": "1"}, ""),
    ],
)
def test_the_recorded_version_with_the_same_code(digests, version):
    assert equal_version(made(*THREE), "toy", digests) == version


@pytest.mark.parametrize(
    ("here", "target", "told"),
    [
        ("0.11.0", "toy.m:c", "toy 0.10.0"),
        ("0.10.0+cu130", "toy.m:c", "toy 0.10.0"),
        ("0.9.5", "toy.m:c", ""),  # it came later
        ("0.9.5", "toy.m:a", "toy 0.9.0"),
        ("0.11.0", "toy.m:gone", ""),  # 0.10.0 had it no more
        ("0.8.0", "toy.m:a", ""),
        ("unknown", "toy.m:c", ""),
        (None, "toy.m:c", ""),
    ],
)
def test_what_the_newest_recorded_version_up_to_this_one_had_is_missed(
    here, target, told, monkeypatch
):
    record = made(
        ("0.9.0", {"toy.m:a": "1", "toy.m:gone": "1"}), ("0.10.0", {"toy.m:a": "1", "toy.m:c": "1"})
    )
    monkeypatch.setattr(_symbols, "shipped", lambda: record)
    adapter = Adapter("toy", "toy", ("toy",), (), ())
    assert _symbols.missed(adapter, lambda name, packages: here)(target) == told


@pytest.mark.parametrize(
    ("digests", "told"),
    [
        ({"toy.m:a": "1", "toy.m:gone": "1"}, ("toy 0.9.0", "")),
        ({"toy.m:a": "1", "toy.m:c": "1"}, ("toy 0.10.0", "toy 0.10.0")),
        ({"toy.m:a": "2", "toy.m:c": "1"}, ("", "")),  # changed: nobody can say
        ({"toy.m:a": "1"}, ("", "")),
    ],
)
def test_a_version_that_nobody_tells_is_the_recorded_one_that_is_equal(digests, told, monkeypatch):
    record = made(
        ("0.9.0", {"toy.m:a": "1", "toy.m:gone": "1"}), ("0.10.0", {"toy.m:a": "1", "toy.m:c": "1"})
    )
    monkeypatch.setattr(_symbols, "shipped", lambda: record)
    monkeypatch.setattr(_symbols, "digest", lambda target: digests.get(target, ""))
    names = ("toy.m:a", "toy.m:c", "toy.m:gone", "toy.m:nobodys")
    seams = tuple(Seam(one, "audit", lambda call: None, why="a test") for one in names)
    missed = _symbols.missed(Adapter("toy", "toy", ("toy",), (), seams), lambda *_: "unknown")
    assert (missed("toy.m:a"), missed("toy.m:c")) == told


@pytest.mark.parametrize(
    ("digest", "told"), [("1", ""), ("2", "toy 0.9.0 has other code than was recorded")]
)
def test_a_recorded_version_with_other_code_is_told_where_it_is_compared(digest, told, monkeypatch):
    monkeypatch.setattr(_symbols, "shipped", lambda: made(("0.9.0", {"toy.m:a": "1"})))
    monkeypatch.setattr(_symbols, "digest", lambda target: digest)
    seam = Seam("toy.m:a", "audit", lambda call: None, why="a test")
    adapter = Adapter("toy", "toy", ("toy",), ("0.9.0",), (seam,))
    assert _symbols.judge_version(adapter, "0.9.0") == (True, "")
    tested, reason = _symbols.judge_version(adapter, "0.9.0", closely=True)
    assert (tested, reason) == (not told, told)


@pytest.mark.parametrize("text", ["[]", "{", "1"])
def test_a_file_that_is_no_record_is_an_error(text, tmp_path):
    (tmp_path / "symbols.json").write_text(text)
    with pytest.raises(ValueError, match=r"symbols\.json|Expecting"):
        read_symbols(tmp_path / "symbols.json")


def test_the_shipped_record_is_as_the_command_writes_it(tmp_path):
    write(_symbols.shipped(), tmp_path / "symbols.json")
    assert (tmp_path / "symbols.json").read_text() == _symbols.FILE.read_text(encoding="utf-8")
    assert {"verl", "skyrl", "nemo-rl", "torchtitan", "megatron-core"} <= set(_symbols.shipped())
