"""The audit of torchtitan's trainers."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import precision_shim

from ..every_framework.shim_warnings import ours
from ..every_framework.without_effect import Case, cases, hold
from . import cpu
from .test_pretraining import train


def only() -> Any:
    """The only audit in ``status()``."""
    (found,) = precision_shim.status().audit
    return found


def test_the_rl_trainer(policy: Any, shim: Any) -> None:
    """The audit lists the scaler, and is complete after the first step that is not skipped."""
    shim()
    trainer = policy()
    assert not only().complete
    cpu.policy_step(trainer, 0, advantage=1e9, parts=1)
    assert not only().complete
    cpu.policy_step(trainer, 1, parts=1)
    found = only()
    assert found.complete
    assert (found.framework, found.subject) == ("torchtitan", "policy")
    assert not found.problems
    assert not found.notes
    (part,) = found.parts
    assert part.scaler == "LossScaler"
    assert part.parameters == sum(one.numel() for one in trainer.model.parameters())
    assert "fp32/fp32 moments" in str(precision_shim.status())


def test_dropped_trainers_leave_no_audit(policy: Any, pretrainer: Any, shim: Any) -> None:
    shim()
    for build in (policy, pretrainer):
        build()
    gc.collect()
    assert not precision_shim.status().audit


def test_pretraining(pretrainer: Any, shim: Any, tmp_path: Path) -> None:
    shim(settings={"audit_dir": str(tmp_path / "audits")})
    trainer = pretrainer("bfloat16", experts=True)
    train(trainer, 1)
    found = only()
    assert found.complete
    assert (found.framework, found.subject) == ("torchtitan", "model")
    assert found.parts[0].scaler is None
    (file,) = (tmp_path / "audits").glob("*.json")
    assert json.loads(file.read_text())["subject"] == "model"


def test_training_in_bfloat16_states(pretrainer: Any, shim: Any, tmp_path: Path) -> None:
    """The audit tells what torchtitan accepts silently: no masters, and a stuck second moment."""
    shim(strict=True)
    found = {}
    for lr in (1e-2, 1e-6):
        config = cpu.trainer_config(tmp_path, "bfloat16", training={"dtype": "bf16"})
        options = {"betas": (0.9, 0.999), "lr": lr}
        config.optimizer.param_groups[0].optimizer_kwargs.update(options)
        with ours() as told:
            trainer = pretrainer(config=config)
            train(trainer, 1)
        audit = precision_shim.status().audit[-1]
        codes = [{one.code for one in some} for some in (audit.problems, audit.notes)]
        found[lr] = (*codes, len(told), all("training.dtype=float32" in one for one in told))
    stuck = {"second-moment-stuck"}
    assert found[1e-2] == (set(), {"no-master", *stuck}, 0, True)  # no update is lost
    assert found[1e-6] == ({"no-master"}, stuck, 1, True)


def test_several_optimizers_are_one_audit(pretrainer: Any, shim: Any, tmp_path: Path) -> None:
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    shim()
    config = cpu.trainer_config(tmp_path)
    adam = {"lr": 1e-3}
    config.optimizer = OptimizersContainer.Config(
        param_groups=[
            ParamGroupConfig(pattern="norm", optimizer_name="Adam", optimizer_kwargs=adam),
            ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=adam),
        ],
        implementation="foreach",
    )
    trainer = pretrainer(config=config)
    train(trainer, 1)
    found = only()
    assert found.complete
    assert [one.optimizer for one in found.parts] == ["Adam", "AdamW"]
    parameters = sum(one.numel() for one in trainer.model_parts[0].parameters())
    assert sum(one.parameters for one in found.parts) == parameters


LOST = {"updates_lost", "updates_lost_exp_avg_sq"}


def test_lost_updates_of_the_rl_trainer(policy: Any, shim: Any) -> None:
    """Lost-update figures appear in the output one step late; a skipped step has no figures."""
    shim(settings={"watch_updates": 1})
    for dtype in ("bfloat16", "float16"):
        trainer = policy(dtype)
        found = [set(cpu.policy_step(trainer, step, parts=1)[1].metrics) for step in range(4)]
        assert not {f"trainer/{name}" for name in LOST} & found[0]
        assert {f"trainer/{name}" for name in LOST} <= found[-1]
        assert ("trainer/loss_scale" in found[-1]) is (dtype == "float16")


def test_lost_updates_in_pretraining(pretrainer: Any, shim: Any, tmp_path: Path) -> None:
    shim(settings={"watch_updates": 1})
    config = cpu.trainer_config(tmp_path, "bfloat16", training={"dtype": "bf16"})
    figures = train(pretrainer(config=config), 4)
    assert not LOST & set(figures[0])
    assert set(figures[-1]) >= LOST
    assert 0 <= figures[-1]["updates_lost"] <= 1


@cases("torchtitan", "fsdp")
def test_keys_without_effect(pretrainer: Any, shim: Any, tmp_path: Path, case: Case) -> None:
    """A model of the user's own may shard itself in a dtype of its own."""
    config = cpu.trainer_config(tmp_path, "bfloat16", training=case.written)
    own = config.model_spec.parallelize_fn

    def parallelize(*args: Any, training: Any, **others: Any) -> Any:
        training = replace(training, mixed_precision_param="bfloat16")
        return own(*args, training=training, **others)

    config.model_spec.parallelize_fn = parallelize
    hold(case, lambda: pretrainer(config=config))
