"""``precision-shim plan`` for slime's and miles' jobs, with their own parsers over Megatron's."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import precision_shim
from precision_shim.cli import main

from .driving import FLAGS, Trainer

JOB = "--actor-num-nodes 1 --actor-num-gpus-per-node 8 --hf-checkpoint none --num-rollout 3"
OWN = [*JOB.split(), "--rollout-batch-size", "4", "--sglang-mem-fraction-static", "0.7"]
OWN += ["--global-batch-size", "32", "--n-samples-per-prompt", "8", "--ref-load", "none"]
pytestmark = pytest.mark.usefixtures("tokenizers")
STATES = (
    "--use-precision-aware-optimizer",
    "--exp-avg-dtype",
    "bf16",
    "--main-grads-dtype",
    "fp32",
)


@pytest.fixture
def line(name: str, tmp_path: Path) -> list[str]:
    """A launch line like those of the trainers' own scripts."""
    (tmp_path / "train.py").write_text(f"from {name}.utils.arguments import parse_args\n")
    job = ["ray", "job", "submit", "--", "PRECISION_SHIM=1", "python3", str(tmp_path / "train.py")]
    return [*job, *FLAGS.split(), *OWN]


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["plan", "--parameters", "1B", "--json", "--", *words])
    said = capsys.readouterr()
    print(said.err)  # shown if the test fails
    return int(str(end.value)), json.loads(said.out) if said.out else said.err


def test_a_job_is_planned(capsys: pytest.CaptureFixture[str], line: list[str], name: str) -> None:
    before = set(sys.modules)
    code, found = plan(capsys, *line)
    assert (code, found["framework"], found["world_size"]) == (0, name, 8)
    (actor,) = found["models"]
    assert (actor["subject"], actor["computes"], actor["layout"]["dp"]) == ("actor", "bf16", 8)
    # What was imported without SGLang is forgotten: the trainer may import it again, with SGLang.
    mine = {one for one in set(sys.modules) - before if one.partition(".")[0] in (name, "sglang")}
    assert mine == set()
    code, found = plan(capsys, *line, "--tensor-model-parallel-size", "2")
    assert (code, found["models"][0]["layout"]["tp"]) == (0, 2)  # no GPU here
    code, found = plan(capsys, *line, "--tensor-model-parallel-size", "3")
    assert code != 0


def test_a_critic_and_a_reference_model(
    capsys: pytest.CaptureFixture[str], line: list[str]
) -> None:
    more = ("--advantage-estimator", "ppo", "--use-kl-loss", "--fp16")
    code, found = plan(capsys, *line, *more)
    assert code == 0
    assert [one["subject"] for one in found["models"]] == ["actor", "critic"]
    assert [one["place"] for one in found["models"]] == ["actor", "actor"]
    assert "loss scaler from 32768" in json.dumps(found["models"])
    assert any("the reference model" in one for one in found["notes"])


def test_slimes_file_of_flags_for_a_role(
    capsys: pytest.CaptureFixture[str], line: list[str], name: str, tmp_path: Path
) -> None:
    if name != "slime":
        pytest.skip("miles has no such file")
    roles = tmp_path / "roles.yaml"
    entry = {"name": "one", "role": "critic", "overrides": {"tensor_model_parallel_size": 2}}
    roles.write_text(json.dumps({"megatron": [entry]}))
    more = ("--advantage-estimator", "ppo", "--megatron-config-path", str(roles))
    code, found = plan(capsys, *line, *more)
    assert code == 0
    assert [one["layout"]["tp"] for one in found["models"]] == [1, 2]


def test_the_file_of_further_flags(
    capsys: pytest.CaptureFixture[str], line: list[str], tmp_path: Path
) -> None:
    """The file sets flags after the parsers and before Megatron's validation."""
    file = tmp_path / "custom.yaml"
    given = ("--custom-config-path", str(file))
    file.write_text(
        "{use_precision_aware_optimizer: true, exp_avg_dtype: bf16, main_grads_dtype: fp32}"
    )
    code, found = plan(capsys, *line, *given)
    assert (code, found["models"]) == (0, plan(capsys, *line, *STATES)[1]["models"])
    file.write_text("{use_precision_aware_optimizer: true, exp_avg_dtype: bf17}")
    code, said = plan(capsys, *line, *given)
    assert (code, "bf17" in said) == (2, True)
    file.write_text("lr: 1e-5")  # a string for YAML
    code, found = plan(capsys, *line, *given)
    assert code != 0
    file.unlink()
    code, said = plan(capsys, *line, *given)
    assert (code, "custom.yaml" in said) == (2, True)


def test_what_keeps_fewer_tensors_is_said(
    capsys: pytest.CaptureFixture[str], line: list[str], name: str
) -> None:
    flags = {
        "slime": ("--use-stateless-adam", "--no-save-optim", "--freeze-params-name-list", "x"),
        "miles": ("--debug-disable-optimizer",),
    }[name]
    code, found = plan(capsys, *line, *flags)
    assert code == 0
    (note,) = [one for one in found["notes"] if "upper bound" in one]
    assert all(flag in note for flag in flags if flag.startswith("--") and "save" not in flag)


def test_miles_replicas_that_are_jobs_of_their_own(
    capsys: pytest.CaptureFixture[str],
    line: list[str],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if name != "miles":
        pytest.skip("only miles has replicas that are jobs of their own")
    manager = "nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager"
    for place in accumulate(manager.split("."), "{}.{}".format):
        monkeypatch.setitem(sys.modules, place, mock.MagicMock())
    size = ("--tensor-model-parallel-size", "2")
    for flags in (("--indep-dp",), ("--use-fault-tolerance", "--ft-components", "train")):
        code, found = plan(capsys, *line, *size, *flags)
        assert (code, found["world_size"], found["models"][0]["layout"]["dp"]) == (0, 2, 1)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    "flags", [(), ("--fp16",), STATES, ("--fp16", "--loss-scale", "128")], ids=str
)
def test_plan_and_worker_decide_alike(
    capsys: pytest.CaptureFixture[str],
    line: list[str],
    name: str,
    on: Callable[..., Any],
    flags: tuple[str, ...],
) -> None:
    if "--loss-scale" in flags:
        flags = (*flags, "--accumulate-allreduce-grads-in-fp32")
    code, found = plan(capsys, *line, "--actor-num-gpus-per-node", "1", *flags)
    assert code == 0
    planned = {one["feature"]: one["chosen"] for one in found["models"][0]["decisions"]}
    on()
    Trainer.of(name, *flags)
    done = {one.feature: one.chosen for one in precision_shim.status().decisions}
    both = planned.keys() & done.keys()
    assert both >= {"bf16-dispatch", "grad-bucket-alignment"}
    assert {key: planned[key] for key in both} == {key: done[key] for key in both}


def test_what_the_parsers_refuse_is_said(
    capsys: pytest.CaptureFixture[str], line: list[str], name: str
) -> None:
    code, said = plan(capsys, *line, "--exp-avg-dtype", "bf17")
    assert (code, "bf17" in said) == (2, True)
    code, said = plan(capsys, *line, "--use-precision-aware-optimizer", "--optimizer", "sgd")
    assert code == 2
    code, said = plan(capsys, *line, "--no-such-flag", "1")
    if name == "slime":  # slime reads flags with parse_known_args
        assert code == 0
        assert any("no parser of slime 0.3.1 reads --no-such-flag" in one for one in said["notes"])
    else:
        assert (code, "it does not know --no-such-flag" in said) == (2, True)
        code, said = plan(capsys, *line, "--lora-rank", "8")
        assert (code, "LoRA" in said) == (2, True)
        code, said = plan(capsys, *line, "--train-backend", "fsdp")
        assert (code, "planned are models on Megatron" in said) == (2, True)
