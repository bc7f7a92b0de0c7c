"""The audit of NeMo-RL's DTensor workers, with loss scaling and without it."""

from __future__ import annotations

import gc

import pytest
from packaging.version import Version

import precision_shim
from precision_shim.errors import PrecisionShimWarning
from precision_shim_adapters.nemo_rl.audit.optimizers import AuditedWorker
from precision_shim_adapters.nemo_rl.config import written

from .support import NEMO_RL, batch, each_kind, loss_for, optimizer, plain, policy_config


@each_kind
def test_alone(kind, worker, shim) -> None:
    shim(features=["audit"])
    with worker(kind, "bfloat16") as one:
        assert isinstance(one, AuditedWorker)
        (before,) = precision_shim.status().audit
        one.train(batch(), loss_for(kind))
    (after,) = precision_shim.status().audit
    subject = "value" if kind == "value" else "policy"
    assert (after.framework, after.subject) == ("nemo-rl", subject)
    assert (before.complete, after.complete, after.ok) == (False, True, True)
    assert [one.code for one in after.problems] == []


@each_kind
def test_dropped_workers_leave_no_audit(kind, worker, shim) -> None:
    shim()
    with worker(kind, "float16") as one:
        assert len(precision_shim.status().audit) == 1
    del one
    gc.collect()
    assert not precision_shim.status().audit


def test_beside_loss_scaling(worker, shim) -> None:
    """The scaler exists before the audit runs, so the audit notes no missing scaler."""
    shim()
    with worker("v2", "float16") as one:
        (before,) = precision_shim.status().audit
        one.train(batch(), loss_for("v2"))
    (after,) = precision_shim.status().audit
    assert before.parts[0].scaler == after.parts[0].scaler == "LossScaler"
    assert "scaler-missing" not in {note.code for note in (*before.notes, *after.notes)}


@pytest.mark.skipif(Version("0.6") > NEMO_RL, reason="NeMo-RL before 0.6 loads float32")
def test_bf16_weights_without_masters(worker, shim) -> None:
    """One warning, also under strict, because the user chose; and a problem of each audit."""
    shim(features=["audit"], strict=True)
    key = "policy.hf_config_overrides.dtype=float32"
    chosen = {"hf_config_overrides": {"dtype": "bfloat16"}, "optimizer": optimizer(1e-6)}
    with (
        pytest.warns(PrecisionShimWarning, match=f"no-master .* 0 of the 8 bits .*{key}") as told,
        worker("v1", "bfloat16", **chosen) as one,
    ):
        one.train(batch(), loss_for("v1"))
    assert sum(one.category is PrecisionShimWarning for one in told) == 1
    (audit,) = precision_shim.status().audit
    assert ([one.code for one in audit.problems], audit.complete) == (["no-master"], True)
    assert [one.chosen for one in precision_shim.status().decisions] == ["no-master"]


def test_a_dtype_that_nothing_reads(worker, shim, model) -> None:
    shim(features=["audit"])
    own = policy_config(model, "bfloat16", "v2")["dtensor_cfg"]
    low = {**own, "mixed_precision": {"param_dtype": "float16"}, "fsdp_output_dtype": "float32"}
    told = r"dtensor_cfg\.mixed_precision\.param_dtype=float16 has no effect: nothing reads"
    with pytest.warns(PrecisionShimWarning, match=told), worker("v2", "bfloat16", dtensor_cfg=low):
        (audit,) = precision_shim.status().audit
    assert [one.code for one in audit.problems] == ["no-effect"]
    told = r"policy\.precison=float16 has no effect: nothing reads this key"
    with (
        pytest.warns(PrecisionShimWarning, match=told),
        worker("v2", "bfloat16", precison="float16"),
    ):
        pass
    told = r"dtensor_cfg\.mixed_precision=True has no effect: nothing reads this key"
    with (
        pytest.warns(PrecisionShimWarning, match=told),
        worker("v2", "bfloat16", dtensor_cfg={**own, "mixed_precision": True}),
    ):
        pass


def test_the_dtype_of_loras_factors_is_written_where_they_are_trained() -> None:
    lora = {"lora_cfg": {"enabled": True, "lora_dtype": "bfloat16"}}

    def of_parameters() -> list[str]:
        return [str(one) for one in written({"dtensor_cfg": lora}, "policy") if one.sets]

    reads = Version("0.5") <= NEMO_RL  # 0.4 makes no adapters
    assert of_parameters() == ["policy.dtensor_cfg.lora_cfg.lora_dtype=bfloat16"] * reads
    lora["lora_cfg"]["enabled"] = False
    assert of_parameters() == []


def test_off_it_is_not_there(worker, shim) -> None:
    shim(features=["dtype-coercion", "fp16-scaling"])
    with worker("v2", "bfloat16") as one:
        assert not isinstance(one, AuditedWorker)
    assert list(precision_shim.status().audit) == []


@pytest.mark.skipif(Version("0.6") > NEMO_RL, reason="before 0.6 nothing can inherit from a worker")
def test_a_worker_of_the_users_own(worker, shim, monkeypatch) -> None:
    shim(features=["audit"])
    beneath = next(one for one in plain("v2").__mro__ if one.__name__.endswith("Impl"))
    mine = type("MyWorker", (beneath,), {})
    monkeypatch.setattr("tests.nemo_rl.support.plain", lambda kind: mine)
    with worker("v2", "bfloat16"):
        assert len(precision_shim.status().audit) == 1
