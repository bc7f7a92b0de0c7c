"""A job that resumes in a new process ends with the states of a job that never stopped."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

import precision_shim
from precision_shim.errors import CheckpointUnreadableError

from ..every_framework.checkpoint_doctor import FP16, ask, verdict
from ..processes.commands import command
from ..processes.rank_server import Ranks


def one(ranks: Ranks, case: str, folder: Path, **options: Any) -> dict[str, Any]:
    (found,) = ranks(case, folder=folder, world=1, **options)
    return found


def same(resumed: dict[str, Any], whole: dict[str, Any]) -> None:
    """Compare parameters, moments, buffers, scale, counters, LR, and the metrics of each step."""
    for part in ("values", "scaler", "state", "rates"):
        assert resumed[part] == whole[part], part
    steps = len(resumed["metrics"])
    assert resumed["metrics"] == whole["metrics"][-steps:]


slow = pytest.mark.slow


@pytest.mark.parametrize(("case", "overflows"), [("policy", [0, 1]), ("pretrain", [1])])
def test_a_resume_is_exact(ranks: Ranks, tmp_path: Path, case: str, overflows: list[int]) -> None:
    whole = one(ranks, case, tmp_path / "whole", first=0, last=4, overflows=overflows, save=True)
    one(ranks, case, tmp_path / "parts", first=0, last=2, overflows=overflows, save=True)
    saved = tmp_path / "parts" / "checkpoint"
    for config, expected in ((None, "exact"), ("fp32", "exact"), ("bf16", "misread")):
        of_job = {"params_dtype": config} if config else None
        assert verdict(saved, "torchtitan", of_job, on=True) == expected
    resumed = one(ranks, case, tmp_path / "parts", first=2, last=4, load=True, save=True)
    same(resumed, whole)
    assert whole["scaler"][3] == len(overflows)
    assert not resumed["warned"]


@slow
@pytest.mark.parametrize(("case", "overflows"), [("policy", [0, 1]), ("pretrain", [0])])
def test_a_resume_of_experts_is_exact(
    ranks: Ranks, tmp_path: Path, case: str, overflows: list[int]
) -> None:
    options: dict[str, Any] = {"experts": True, "overflows": overflows}
    whole = one(ranks, case, tmp_path / "whole", first=0, last=4, **options)
    one(ranks, case, tmp_path / "parts", first=0, last=2, save=True, **options)
    resumed = one(ranks, case, tmp_path / "parts", first=2, last=4, load=True, experts=True)
    if case == "policy":  # PolicyTrainer never resets or reads tokens_per_expert
        for found in (whole, resumed):
            found["values"] = {
                name: value for name, value in found["values"].items() if "tokens_per" not in name
            }
    same(resumed, whole)


def test_off_then_on(ranks: Ranks, tmp_path: Path) -> None:
    """A checkpoint without a scaler record gives one warning and a fresh scaler."""
    one(ranks, "policy", tmp_path, first=0, last=2, save=True, on=False)
    told = verdict(tmp_path / "checkpoint", "torchtitan", FP16, on=True)
    assert told == "starts anew"
    resumed = one(ranks, "policy", tmp_path, first=2, last=3, load=True)
    (warning,) = resumed["warned"]
    assert "no loss scaler state" in warning
    assert "torchtitan 0.3.0" in warning
    assert "step-2" in warning
    assert resumed["scaler"] == [1024.0, 1, 1, 0, 0]
    assert resumed["state"]["policy_version"] == 3


@slow
def test_on_then_off(ranks: Ranks, tmp_path: Path) -> None:
    """Without the shim torchtitan ignores the scaler's record."""
    before = one(ranks, "pretrain", tmp_path, first=0, last=2, save=True)
    assert verdict(tmp_path / "checkpoint", "torchtitan", on=False) == "starts anew"
    resumed = one(ranks, "pretrain", tmp_path, first=2, last=2, load=True, on=False)
    assert resumed["values"] == before["values"]
    assert resumed["state"] == before["state"]


NUMBER = b'"growth_tracker": '
"""The bytes before a digit in a scaler's record."""


def test_a_damaged_record(ranks: Ranks, tmp_path: Path) -> None:
    one(ranks, "policy", tmp_path, first=0, last=2, save=True)
    damaged = 0
    for file in (tmp_path / "checkpoint" / "step-2").glob("*.distcp"):
        content = file.read_bytes()
        at = content.find(NUMBER) + len(NUMBER)
        if at >= len(NUMBER):
            file.write_bytes(content[:at] + b"9" + content[at + 1 :])
            damaged += 1
    assert damaged == 1
    with pytest.raises(CheckpointUnreadableError, match=r"\.distcp: it is damaged.*Bad CRC-32"):
        verdict(tmp_path / "checkpoint", "torchtitan", on=True)
    found = one(ranks, "policy", tmp_path, first=2, last=3, load=True)
    assert "ScalerCheckpointError" in found["error"]
    assert "does not match its digest" in found["error"]
    assert "exclude_from_loading" in found["error"]
    assert "delete" not in found["error"]  # a scaler's record cannot be deleted alone
    assert "step-2" in found["error"]


@slow
def test_metadata_that_cannot_be_read_is_an_error(ranks: Ranks, tmp_path: Path) -> None:
    """Unreadable metadata raises an error, and does not count as a checkpoint without a record."""
    one(ranks, "policy", tmp_path, first=0, last=2, save=True)
    metadata = tmp_path / "checkpoint" / "step-2" / ".metadata"
    metadata.write_bytes(pickle.dumps({}))
    found = one(ranks, "policy", tmp_path, first=2, last=3, load=True)
    assert "ScalerCheckpointError" in found["error"]
    assert str(metadata) in found["error"]
    assert "Whether" in found["error"]
    assert "warned" not in found or not found["warned"]


BF16_STATES = "fused_opt_states_bf16"


def with_states(pretrainer: Any, folder: Path, optimizer: str) -> tuple[Any, set[Any]]:
    """A trainer whose optimizer has states, as after a first step; and the moments' dtypes.

    torch's fused Adam cannot step bf16 moments of fp32 parameters on a CPU, so torchtitan's own
    hook runs alone.
    """
    import torch

    trainer = pretrainer("bfloat16", folder, optimizer=optimizer, checkpoint={"enable": True})
    for parameter in trainer.model_parts[0].parameters():
        parameter.grad = torch.zeros_like(parameter)
    (inner,) = trainer.optimizers
    if optimizer == BF16_STATES:
        (hook,) = inner._optimizer_step_pre_hooks.values()
        hook(inner, (), {})
    else:
        inner.step()
    return trainer, moments(inner)


def moments(optimizer: Any) -> set[Any]:
    return {
        one[name].dtype for one in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")
    }


def test_bf16_moments_are_loaded_as_fp32(pretrainer: Any, shim: Any, tmp_path: Path) -> None:
    """The doctor says so; the audit does not take them for fp32 before the first step."""
    import torch

    shim()
    trainer, kept = with_states(pretrainer, tmp_path, BF16_STATES)
    (audit,) = precision_shim.status().audit
    assert audit.parts[0].components["exp_avg"].dtypes == ()
    found = precision_shim.audit(trainer.model_parts, trainer.optimizers).parts[0]
    assert (kept, found.components["exp_avg"].dtypes) == ({torch.bfloat16}, ("bf16",))
    trainer.checkpointer.save(1)
    outcome = ask(tmp_path / "checkpoint", "torchtitan").outcome
    assert outcome.verdict == "misread"
    assert "cast its bf16 exp_avg to the parameters' fp32" in outcome.because
    resumed, _ = with_states(pretrainer, tmp_path, BF16_STATES)
    resumed.checkpointer.load(1)
    (inner,) = resumed.optimizers
    assert moments(inner) == {torch.float32}


def test_what_is_not_known_is_named(pretrainer: Any, shim: Any, tmp_path: Path) -> None:
    import torch

    shim()
    trainer, _ = with_states(pretrainer, tmp_path, "foreach")
    trainer.checkpointer.save(1)
    folder = tmp_path / "checkpoint"
    assert ask(folder, "torchtitan").outcome.exact
    torch.save({}, folder / "step-1" / "ema.pt")
    code, said, _ = command("checkpoint", "--framework=torchtitan", folder)
    assert (code, "not known: no rule covers the file ema.pt" in said) == (3, True)
