"""The example of this framework."""

from __future__ import annotations

import pytest
from packaging.version import Version

from ..examples_run import run
from .fsdp_support import VERL


@pytest.mark.slow
@pytest.mark.skipif(Version("0.7") > VERL, reason="verl 0.6 has no engine that its workers build")
def test_the_example_trains() -> None:
    said = run("verl_fsdp", "verl")
    assert said.count("step") >= 8
