"""Source with recorded facts is not parsed; other source, or another declaration, is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from precision_shim.process import symbols
from precision_shim.process.digest import digest
from precision_shim.seams import _source, check
from precision_shim.seams._source import source_digest

from ...environments.symbol_record import facts_of


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that are parsed from now on."""
    texts: list[str] = []
    parse = _source._parse
    _source._described.clear()

    def spied(text: str) -> Any:
        texts.append(text)
        return parse(text)

    spied.cache_clear = parse.cache_clear
    monkeypatch.setattr(_source, "_parse", spied)
    return texts


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Writes what the check of these seams finds into the record."""

    def write(*seams):
        facts: dict[str, list[str]] = {}
        for seam in seams:
            for module, *fact in facts_of(seam):
                facts.setdefault(source_digest(module), []).append(symbols.noted(*fact))
            of_digest = symbols.fact_of_digest(seam.target, digest(seam.target))
            facts[source_digest(seam.module)].append(symbols.noted(of_digest))
        file = tmp_path / "sources.json"
        file.write_text(json.dumps(facts))
        monkeypatch.setattr(symbols, "SOURCES", file)
        symbols._known_sources.cache_clear()
        _source._described.clear()

    yield write
    symbols._known_sources.cache_clear()


def rows(lab, *seams, proved=None):
    given = {"proved": proved} if proved else {}
    return [
        (row.seam.target, row.state, row.reason)
        for row in check(lab.adapter(*seams), ("f", "g"), None, **given).rows
    ]


def test_what_is_recorded_is_not_parsed(lab, record, parsed):
    seams = [
        lab.seam("toy.ops:scale", only_if=("toy.ops:scale mentions factor",), unless=("toy.new",)),
        lab.seam("toy.ops:Box.add", relies_on=("value",)),
        lab.seam("toy.ops:shift", unless=("toy.ops:shift mentions factor",)),
        lab.seam("toy.ops:shift", refusal="not here", only_if=("toy.ops:shift",)),
        lab.seam("toy.ops:Box.double", only_if=("toy.ops:Box.gone",)),
        lab.seam("toy.ops:Box.double", unless=("toy.ops",)),
    ]
    before = rows(lab, *seams)
    assert len(before) == 4
    record(*seams)
    parsed.clear()
    assert rows(lab, *seams, proved=symbols.proofs()) == before
    assert parsed == []


def test_digests_of_recorded_source_are_not_computed(lab, record, parsed, monkeypatch):
    seams = [lab.seam("toy.ops:scale"), lab.seam("toy.ops:Box.gone", optional=True)]
    known = {"toy.ops:scale": {digest("toy.ops:scale"): ["1.0"]}, "toy.ops:Box.gone": {"1": ["0"]}}
    monkeypatch.setattr(symbols, "shipped", lambda: {"toy": known})
    record(*seams)
    parsed.clear()
    judged = {"adapter": lab.adapter(*seams), "version": "1.0", "closely": True}
    assert symbols.judge_version(**judged) == (True, "")
    assert parsed == []
    lab.write({"toy/ops.py": "def scale(value, by=2):\n    return value * by\n"})
    told = "toy 1.0 has other code than was recorded"
    assert symbols.judge_version(**judged) == (False, told)
    assert len(parsed) > 0


def test_other_source_is_parsed_and_refused(lab, record, parsed):
    seam = lab.seam("toy.ops:scale", "toy_wrappers:negate", relies_on=("factor",))
    record(seam)
    lab.write({"toy/ops.py": "def scale(value, by=2):\n    return value * by\n"})
    parsed.clear()
    ((_, state, reason),) = rows(lab, seam, proved=symbols.proofs())
    assert (state, len(parsed) > 0) == ("refused", True)
    assert "no longer mentions 'factor'" in reason


@pytest.mark.parametrize(
    ("wrapper", "fields"),
    [
        ("negate", {"relies_on": ("factor", "gone")}),  # another declaration
        ("negate_by", {}),  # reads a parameter that the symbol lacks
        ("awaits", {}),  # wraps another kind of symbol
    ],
)
def test_a_changed_declaration_is_checked(lab, record, wrapper, fields):
    record(lab.seam("toy.ops:scale", relies_on=("factor",)))
    seam = lab.seam("toy.ops:scale", f"toy_wrappers:{wrapper}", **fields)
    ((_, state, _),) = rows(lab, seam, proved=symbols.proofs())
    assert state == "refused"


def test_a_probe_of_the_frameworks_own_feature_reads_the_source(lab, record):
    seam = lab.seam("toy.ops:scale", native="toy_wrappers:yes")
    record(seam)
    ((_, state, _),) = rows(lab, seam, proved=symbols.proofs())
    assert state == "native"


@pytest.mark.parametrize("text", ["", "[1]", "3"])
def test_without_a_readable_record_all_is_parsed(lab, tmp_path, monkeypatch, text):
    (tmp_path / "sources.json").write_text(text)
    monkeypatch.setattr(symbols, "SOURCES", tmp_path / "sources.json")
    symbols._known_sources.cache_clear()
    ((_, state, _),) = rows(lab, lab.seam("toy.ops:scale"), proved=symbols.proofs())
    symbols._known_sources.cache_clear()
    assert state == "pending"


def test_hidden_parameters_are_read_from_the_source_when_they_are_needed(lab, record, parsed):
    lab.write(
        {
            "toy/hidden.py": "def hide(function):\n"
            "    def passes(*args, **kwargs):\n        return function(*args, **kwargs)\n"
            "    return passes\n\n\n"
            "@hide\ndef shift(value, by=1):\n    return value + by\n"
        }
    )
    seam = lab.seam("toy.hidden:shift", "toy_wrappers:negate_by")
    record(seam)
    parsed.clear()
    engine = lab.engine(proved=symbols.proofs)
    engine.add(lab.adapter(seam))
    assert lab.load("toy.hidden").shift(3) == -4
    assert lab.states(engine) == ["wrapped"]
    assert len(parsed) > 0
