"""``precision-shim plan`` for ROLL's jobs, with ROLL's config classes and the worker's verdict."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import precision_shim
from precision_shim.cli import main
from precision_shim.precision.dtypes import CANONICAL

from . import jobs
from .driving import Trainer

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture
def plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, Any]]:
    """Plans a job with the given config; returns the exit status, and the plan or the error."""
    monkeypatch.chdir(tmp_path)

    def planned(
        values: dict[str, Any],
        *words: str,
        options: tuple[str, ...] = ("--parameters", "1B"),
    ) -> tuple[int, Any]:
        script = jobs.write(tmp_path, values)
        capsys.readouterr()
        given = ("PRECISION_SHIM=1", "python", script.name, *(words or jobs.WHERE))
        with pytest.raises(SystemExit) as end:
            main(["plan", *options, "--json", "--", *given])
        said = capsys.readouterr()
        print(said.err)  # shown if the test fails
        return int(str(end.value)), json.loads(said.out) if said.out else said.err

    return planned


def test_a_job_is_planned(plan: Any) -> None:
    before, here = dict(os.environ), Path.cwd()
    code, found = plan(jobs.config("fp16", tensor_model_parallel_size=2))
    assert (code, found["framework"], found["world_size"]) == (0, "roll", 8)
    (actor,) = found["models"]
    assert (actor["subject"], actor["computes"]) == ("actor_train", "fp16")
    assert (actor["layout"]["tp"], actor["layout"]["dp"]) == (2, 4)
    assert "loss scaler from 32768" in json.dumps(actor)
    assert (dict(os.environ), Path.cwd()) == (before, here)  # ROLL's config writes to both
    code, found = plan(jobs.config(tensor_model_parallel_size=3))
    assert code != 0


def test_a_critic(plan: Any) -> None:
    values = jobs.config()
    critic = {**sharded()["actor_train"], "device_mapping": "list(range(8,16))"}
    critic["model_args"] = {"model_type": "auto_token_classification"}
    code, found = plan({**values, "adv_estimator": "gae", "critic": critic})
    assert code == 0
    assert [one["subject"] for one in found["models"]] == ["actor_train", "critic"]
    assert len({one["place"] for one in found["models"]}) == 2
    critic["model_args"] = {"model_type": "trl"}
    code, found = plan({**values, "adv_estimator": "gae", "critic": critic})
    assert (code, any("value head" in one for one in found["models"][1]["notes"])) == (0, True)
    _, found = plan({**values, "critic": critic})  # ROLL makes no critic for this estimator
    assert [one["subject"] for one in found["models"]] == ["actor_train"]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("written", [{}, {"accumulate_allreduce_grads_in_fp32": True}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_plan_and_worker_decide_alike(
    plan: Any, on: Callable[..., Any], dtype: str, written: dict[str, Any]
) -> None:
    code, found = plan(jobs.config(dtype, **written))
    assert code == 0
    planned = {one["feature"]: one["chosen"] for one in found["models"][0]["decisions"]}
    on()
    Trainer.of(DTYPES[dtype], **written)
    done = {one.feature: one.chosen for one in precision_shim.status().decisions}
    both = planned.keys() & done.keys()
    assert both >= {"bf16-dispatch", "grad-bucket-alignment"}
    assert {key: planned[key] for key in both} == {key: done[key] for key in both}


def sharded(**written: Any) -> dict[str, Any]:
    return jobs.config(strategy="fsdp2_train", **written)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "fp32"])
def test_a_job_on_fsdp2(
    plan: Any, on: Callable[..., Any], one_process: None, tmp_path: Path, dtype: str
) -> None:
    from . import sharded as live

    values = sharded(fsdp_size=4, param_dtype=dtype)
    values["actor_infer"]["model_args"]["dtype"] = "fp16"
    code, found = plan(values)
    (actor,) = found["models"]
    assert (code, actor["layout"]) == (0, {"fsdp": 4, "replicas": 2, "tp": 1})
    assert found["megatron_core"] is None
    on()
    trainer = live.Trainer.of(tmp_path / "model", dtype)
    strategy = trainer.strategy
    assert CANONICAL[actor["computes"]] is strategy.param_dtype
    assert CANONICAL[actor["reduces"]] is strategy.reduce_dtype
    # ROLL loads the parameters in the same dtype, the shim in fp32.
    (kept,) = {one.dtype for one in trainer.parameters()}
    for side, expected in (("before", strategy.param_dtype), ("after", kept)):
        held = actor[side][0]["parts"][0]["components"]
        for component in ("exp_avg", "params"):
            (name,) = held[component]["dtypes"]
            assert CANONICAL[name] is expected, (side, component)
    assert kept is (strategy.param_dtype if dtype != "float16" else torch.float32)
    done = [one.chosen for one in precision_shim.status().decisions]
    assert [one["chosen"] for one in actor["decisions"]] == done


def test_what_fsdp2_refuses(plan: Any) -> None:
    for written, code in (({"param_dtype": "fp61"}, "dtype"), ({"fsdp_size": 3}, "world-size")):
        status, found = plan(sharded(**written))
        assert (status, [one["code"] for one in found["problems"]]) == (1, [code])
    values = sharded(fsdp_size=1)
    values["actor_train"]["model_args"]["ulysses_size"] = 2
    status, found = plan(values)
    assert (status, found["problems"][0]["key"].endswith(".fsdp_size")) == (1, True)


def test_models_that_are_not_counted_are_named(plan: Any) -> None:
    values = jobs.config()
    infer = {"strategy_args": {"strategy_name": "hf_infer"}, "device_mapping": "list(range(0,8))"}
    values["reference"] = {**values["reference"], **infer}
    code, found = plan(values)
    assert (code, [one for one in found["notes"] if "(reference)" in one]) == (
        0,
        ["not counted: the reference model (reference), on the GPUs [0, 1, 2, 3, 4, 5, 6, 7]"],
    )
    code, found = plan({**values, "enable_reference": False, "init_kl_coef": 0.0})
    assert not any("reference" in one for one in found["notes"])


def test_what_is_not_planned_is_said(plan: Any, tmp_path: Path) -> None:
    for values, said in (
        (jobs.config(strategy="hf_infer"), "planned are models on Megatron and on FSDP2"),
        (jobs.config(strategy="fsdp2_train", ep_size=2), "ep_size=2"),
        (jobs.config(no_such_key=1), "no_such_key"),
        ({**jobs.config(), "actor_train": {"strategy_args": {"strategy_name": "none"}}}, "none"),
        ({**jobs.config(), "rollout_batch_size": 63}, "63"),
    ):
        code, found = plan(values)
        assert (code, said in found) == (2, True), found
    values = jobs.config()
    values["actor_train"]["model_args"]["lora_target"] = "all-linear"
    assert plan(values)[0] == 2
    code, found = plan(values, "--config_path", "nowhere", "--config_name", "nothing")
    assert (code, "nowhere" in found) == (2, True)
