"""The report of ``precision-shim doctor`` on TransformerEngine, with verl and Megatron.

The doctor reads TransformerEngine's metadata and imports TransformerEngine. So the fake
installations of these tests have metadata and an importable package only.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from packaging.version import Version

from ..processes.commands import python
from .conftest import VERL

pytestmark = [
    pytest.mark.skipif(
        find_spec("transformer_engine") is not None, reason="a TransformerEngine is installed"
    ),
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed"),
    pytest.mark.skipif(
        Version("0.7") > VERL, reason="verl 0.6's environment is for the untested version"
    ),
    pytest.mark.slow,
]

OPTIMIZER = "use_precision_aware_optimizer=true ends in UnsupportedPrecisionError"


def doctor(**variables: str) -> tuple[int, str, str]:
    """The doctor's exit status, its text unfolded, and the heading before the verdict."""
    done = python("-m", "precision_shim", "doctor", **variables)
    last = [line for line in done.stdout.splitlines() if line[:1].strip()][-2]
    return done.returncode, " ".join(done.stdout.split()), last


def test_without_transformer_engine_it_says_how_the_job_ends() -> None:
    status, text, last = doctor()
    assert status == 0
    assert (
        f"TransformerEngine is not installed: optimizer states stay fp32, and {OPTIMIZER}" in text
    )
    assert "Install TransformerEngine 2.3 or newer" in text
    assert last == "no problems, but the limits above"


def test_states_that_a_variable_asks_for_and_that_cannot_be_had_are_a_problem() -> None:
    status, text, last = doctor(PRECISION_SHIM_OPTIMIZER_STATES="follow-model")
    assert (status, last) == (1, "problems")
    assert OPTIMIZER in text.partition(" problems ")[2]
