"""Whether a feature is in force: worker, doctor, plan and checkpoint doctor say the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.version import Version

from precision_shim.scaling import save

from ..checkpoint_doctor import verdict
from ..in_force import disagreements, refused
from ..unit.checkpoints.written import of_ranks, scaler
from .conftest import VERL

pytestmark = pytest.mark.skipif(
    Version("0.7") > VERL, reason="verl 0.6's environment is for the untested version"
)

ENGINE, LEGACY = "fsdp engine", "legacy fsdp workers"
BY_ENGINE = {"use_legacy_worker_impl": "disable"}


def test_all_say_what_the_worker_says() -> None:
    assert disagreements("verl") == []


def test_the_checkpoint_doctor_asks_for_the_workers_of_the_job(tmp_path: Path) -> None:
    """verl 0.7's PPO trains in its legacy workers unless told otherwise, its SFT in the engine."""
    actor = of_ranks(tmp_path / "global_step_1" / "actor")
    sft = of_ranks(tmp_path / "sft" / "global_step_1")
    for folder in (actor, sft):
        save(folder, scaler())

    def said() -> list[str]:
        return [
            verdict(actor, "verl", on=True),
            verdict(actor, "verl", BY_ENGINE, on=True),
            verdict(sft, "verl", on=True),
        ]

    assert said() == ["exact"] * 3
    with refused("verl", "fp16-scaling", ENGINE):
        ppo = "exact" if Version("0.8") > VERL else "starts anew"
        assert said() == [ppo, "starts anew", "starts anew"]
    with refused("verl", "fp16-scaling", LEGACY):
        ppo = "starts anew" if Version("0.8") > VERL else "exact"
        assert said() == [ppo, "exact", "exact"]
