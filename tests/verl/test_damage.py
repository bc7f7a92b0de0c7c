"""Damaged checkpoints of verl's on Megatron: the checkpoint doctor calls none plainly exact.

Those of FSDP are in ``test_fsdp_fp16``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.version import Version

from ..checkpoint_damage import wrong_answers
from ..checkpoint_doctor import ask
from .conftest import VERL
from .test_checkpoints import STEPS, job

pytestmark = pytest.mark.skipif(
    Version("0.7") > VERL, reason="verl 0.6's environment is for the untested version"
)

CONFIG = {"adam_beta2": 0.95, "grad_reduce_in_fp32": True}


@pytest.mark.parametrize(
    "seeds", [range(8), pytest.param(range(8, 58), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_no_damage_goes_unsaid(
    fused_adam: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seeds: range
) -> None:
    # Before 0.9 the states follow the model otherwise, and its own are fp32.
    monkeypatch.setenv("PRECISION_SHIM_OPTIMIZER_STATES", "as-configured")
    saved = tmp_path / "saved"
    first = job()
    first.train(STEPS)
    first.save(saved, "fully_reshardable")
    assert ask(saved, "verl", CONFIG, on=True).outcome.exact
    assert not list(wrong_answers(saved, "verl", CONFIG, tmp_path / "damaged", seeds))
