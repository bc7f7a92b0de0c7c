"""The example of this framework."""

from __future__ import annotations

import pytest

from ..examples_run import run


@pytest.mark.slow
def test_the_example_trains() -> None:
    said = run("skyrl_fsdp", "skyrl")
    assert said.count("step") >= 8
