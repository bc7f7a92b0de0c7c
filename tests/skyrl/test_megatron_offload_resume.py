"""SkyRL's own strategy resumes an optimizer that Megatron offloads to the CPU.

SkyRL fixes Megatron's load of ``dp_reshardable`` checkpoints in part; the shim fixes the rest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import precision_shim

from ..audit.offloading import same_stepped, stepped
from ..every_framework.checkpoint_doctor import ask, told_by
from ..stand_ins.fake_gpu import FakeGpu
from .support import build
from .test_megatron_checkpoints import BETA, KWARGS, train

pytestmark = pytest.mark.slow

RESHARDABLE = "trainer.policy.megatron_config.dist_ckpt_optim_fully_reshardable"


def outcome(worker: Any, folder: str, saved: Any, straight: Any, after: Any) -> str:
    """Returns ``exact``, ``other weights``, or an error's name."""
    try:
        worker.load_checkpoint(folder)
        loaded = same_stepped(saved, stepped(worker.optimizer))
        same = train(worker, range(3, 5)) == straight
    except Exception as error:  # Megatron raises several kinds
        return type(error).__name__
    exact = loaded and same and same_stepped(after, stepped(worker.optimizer))
    return "exact" if exact else "other weights"


@pytest.mark.parametrize(
    ("reshardable", "share", "aware"), [(False, 0.5, True), (True, 0.5, False), (False, 0.0, False)]
)
def test_a_resume_is_exact_and_the_doctor_says_so(
    fused_adam: str,
    checkpoints: dict[str, Path],
    shim: Any,
    tmp_path: Path,
    reshardable: bool,
    share: float,
    aware: bool,
) -> None:
    known = {
        "use_precision_aware_optimizer": aware,
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": share,
    }
    overrides = [BETA, *(f"{KWARGS}.{key}={value}" for key, value in known.items())]
    overrides.append(f"{RESHARDABLE}={reshardable}")
    done, told = {}, {}
    from transformer_engine.pytorch.optimizers import FusedAdam

    # At its import SkyRL lists FusedAdam as safe to load; the stand-in FusedAdam came later.
    with FakeGpu(), torch.serialization.safe_globals([FusedAdam]):
        for on in (False, True):
            precision_shim.uninstall()
            if on:
                shim()
            folder = str(tmp_path / str(on))
            first = build(checkpoints["bfloat16"], *overrides)
            train(first, range(3))
            first.save_checkpoint(folder)
            saved = stepped(first.optimizer)
            straight = train(first, range(3, 5))
            after = stepped(first.optimizer)
            second = build(checkpoints["bfloat16"], *overrides)
            told[on] = ask(folder, "skyrl", known).outcome.verdict
            done[on] = outcome(second, folder, saved, straight, after)
    assert told == {on: told_by(word) for on, word in done.items()}
    if aware:
        assert done == {False: "other weights", True: "exact"}
    elif share == 0.0:  # without offloading there is no step count
        assert done == {False: "other weights", True: "CheckpointLayoutError"}
    else:  # Megatron raises its own errors
        assert done[True] == done[False] != "exact"
