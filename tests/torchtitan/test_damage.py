"""Damaged checkpoints of torchtitan's: the checkpoint doctor calls none of them plainly exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..checkpoint_damage import wrong_answers
from ..checkpoint_doctor import FP16, ask
from ..in_force import refused
from ..rank_server import Ranks


@pytest.mark.parametrize(("case", "group"), [("policy", "rl"), ("pretrain", "pretraining")])
def test_the_checkpoint_doctor_asks_for_the_trainer_of_the_job(
    ranks: Ranks, tmp_path: Path, case: str, group: str
) -> None:
    ranks(case, folder=tmp_path, world=1, first=0, last=1, save=True)
    saved = tmp_path / "checkpoint"
    for other in ("rl", "pretraining"):
        with refused("torchtitan", "fp16-scaling", other):
            assert ask(saved, "torchtitan", FP16, on=True).outcome.exact is (other != group)


@pytest.mark.parametrize(
    "seeds", [range(8), pytest.param(range(8, 58), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_no_damage_goes_unsaid(ranks: Ranks, tmp_path: Path, seeds: range) -> None:
    ranks("pretrain", folder=tmp_path, world=1, first=0, last=2, save=True)
    saved = tmp_path / "checkpoint"
    assert ask(saved, "torchtitan", FP16, on=True).outcome.exact
    work = tmp_path / "damaged"
    assert not list(wrong_answers(saved, "torchtitan", FP16, work, seeds))
    # The same where next to nothing is held against its checksum.
    assert not list(wrong_answers(saved, "torchtitan", FP16, work, seeds[:4], most=1 << 10))
