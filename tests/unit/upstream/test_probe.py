"""Probes: a rule's assumption, what was found, and what cannot be tested here."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from precision_shim.errors import SeamError
from precision_shim.upstream.probes import Answer, probe, probes_in, run

MODULE = """
from precision_shim.upstream.probes import Answer, probe


@probe("holds", assumes="one is one", rule="a:b")
def holds():
    return Answer(1, 1)


@probe("differs", assumes="one is two", rule="a:b", needs=("toy.ops",))
def differs():
    return Answer(1, 2)


@probe("raises", assumes="nothing is raised", rule="a:b")
def raises():
    raise ZeroDivisionError("what was found")


@probe("absent", assumes="it is there", rule="a:b", needs=("toy.nowhere",))
def absent():
    raise AssertionError


@probe("broken", assumes="it can be imported", rule="a:b", needs=("toy.broken",))
def broken():
    raise AssertionError


def no_probe():
    raise AssertionError
"""


@pytest.fixture
def outcomes(write_modules):
    write_modules(
        {
            "toy/__init__.py": "",
            "toy/ops.py": "",
            "toy/broken.py": "raise ImportError('no such library')\n",
            "toy_probes.py": MODULE,
            "no_probes.py": "",
        }
    )
    return {one.name: run(one) for one in probes_in("toy_probes")}


def test_every_end_has_a_name(outcomes):
    assert {name: one.state for name, one in outcomes.items()} == {
        "holds": "holds",
        "differs": "fails",
        "raises": "fails",
        "absent": "absent",
        "broken": "unasked",
    }
    assert list(outcomes) == ["holds", "differs", "raises", "absent", "broken"]


def test_what_was_assumed_and_found_is_told(outcomes):
    differs = outcomes["differs"]
    assert (differs.assumes, differs.rule) == ("one is two", "a:b")
    assert (differs.assumed, differs.found) == ("1", "2")
    assert outcomes["raises"].found == "ZeroDivisionError: what was found"
    assert "toy.nowhere is not installed" in outcomes["absent"].found
    assert "no such library" in outcomes["broken"].found


def test_a_module_without_probes_is_named(outcomes):
    with pytest.raises(SeamError, match="no_probes declares no probe"):
        probes_in("no_probes")


def test_the_function_stays_what_it_is():
    @probe("x", assumes="x", rule="x")
    def ask():
        return Answer(1, 1)

    assert ask() == (1, 1)


def test_what_is_assumed_of_torch_holds():
    pytest.importorskip("torch")
    for one in probes_in("precision_shim_adapters.fp16.probes"):
        outcome = run(one)
        assert outcome.state == "holds", outcome


def test_what_rests_on_a_probe_is_there():
    """If a rule has moved, a report would refer its reader to a rule that does not exist."""
    from precision_shim.seams import look
    from precision_shim_adapters.frameworks import FRAMEWORKS

    modules = dict.fromkeys(name for one in FRAMEWORKS for name in one.probes)
    rules = {one.rule for module in modules for one in probes_in(module)}
    assert len(rules) > 5
    for rule in rules:
        module, _, name = rule.partition(":")
        symbol = look(f"{module}:{name or 'nothing'}")
        assert symbol.module_found, rule
        assert not name or name in Path(str(find_spec(module).origin)).read_text(), rule
