"""Damaged checkpoints of NeMo-RL's: the checkpoint doctor calls none of them plainly exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ..checkpoint_damage import wrong_answers
from ..checkpoint_doctor import FP16, ask
from ..in_force import refused
from .support import batch, loss_for, save


@pytest.mark.parametrize("kind", ["v1", "v2"])  # weights in .distcp files, and in safetensors
@pytest.mark.parametrize(
    "seeds", [range(8), pytest.param(range(8, 58), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_no_damage_goes_unsaid(
    worker: Any, shim: Any, tmp_path: Path, kind: str, seeds: range
) -> None:
    shim()
    saved = tmp_path / "step_1" / "policy"
    with worker(kind, "float16") as one:
        one.train(batch(), loss_for(kind))
        save(one, saved)
    assert ask(saved, "nemo-rl", FP16).outcome.exact
    for other in ("v1", "v2"):  # the group is that of the workers that wrote the files
        with refused("nemo-rl", "fp16-scaling", f"dtensor {other}"):
            assert ask(saved, "nemo-rl", FP16, on=True).outcome.exact is (other != kind)
    assert not list(wrong_answers(saved, "nemo-rl", FP16, tmp_path / "damaged", seeds))
