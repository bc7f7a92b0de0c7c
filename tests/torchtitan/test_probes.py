"""What the rules assume of torch and its scalers, asked of what is installed."""

from __future__ import annotations

from precision_shim.cli._probing import ask
from precision_shim.process.registry import entries

from ..probes_hold import hold


def test_what_the_rules_assume_holds() -> None:
    hold("torchtitan")


def test_the_doctor_asks_them() -> None:
    """In a process without the tests' answers for a GPU, where not all can be imported."""
    outcomes = ask(entries(third_party=False)["torchtitan"].load().probes)
    assert {one["state"] for one in outcomes} <= {"holds", "unasked"}
    assert sum(one["state"] == "holds" for one in outcomes) >= 5
