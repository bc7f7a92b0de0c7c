"""``precision-shim plan`` for slime's and miles' jobs, with their own parsers over Megatron's."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import precision_shim
from precision_shim.cli import main
from precision_shim.planning import command, request
from precision_shim.process.settings import resolve
from precision_shim_adapters import flag_parsers, flag_plans

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
        "miles": ("--debug-disable-optimizer", "--optimizer=sgd", "--loss-scale=-5"),
    }[name]
    code, found = plan(capsys, *line, *flags)
    assert code == 0
    (note,) = [one for one in found["notes"] if "upper bound" in one]
    unsaid = ("--no-save-optim", "--optimizer=sgd", "--loss-scale=-5", "x")
    assert all(flag in note for flag in flags if flag not in unsaid)


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


def write(folder: Path, name: str, value: Any) -> str:
    """Write a YAML file, which may be JSON, and return its path."""
    (folder / name).write_text(json.dumps(value))
    return str(folder / name)


def one_role(folder: Path, **overrides: Any) -> tuple[str, str]:
    """The flag with a file of the actor's own values, which slime sets after all checks."""
    entry = {"name": "one", "role": "actor", "overrides": overrides}
    return "--megatron-config-path", write(folder, "roles.yaml", {"megatron": [entry]})


def hub_config(folder: Path, **values: Any) -> str:
    """A directory with the ``config.json`` of a model that the line's flags describe."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(
        **{"vocab_size": 31, "intermediate_size": 64, "rms_norm_eps": 1e-5, **sizes, **values},
        tie_word_embeddings=True,
    )
    config.save_pretrained(folder / "hub")
    return str(folder / "hub")


ILLEGAL = [
    (("--fp16", "--loss-scale", "-5"), "--loss-scale"),
    (("--loss-scale", "nan"), "--loss-scale"),
    (("--fp16", "--initial-loss-scale", "1e39"), "--initial-loss-scale"),
    (("--fp16", "--initial-loss-scale", "1e-60"), "--initial-loss-scale"),
    (("--exp-avg-dtype", "bf16"), "--exp-avg-dtype"),
    (("--weight-decay", "-1"), "--lr"),
    (("--lr-decay-style", "WSD"), "--lr"),
    (("--ref-load", ""), "--ref-load"),
]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("flags", "key"), ILLEGAL, ids=str)
def test_what_ends_the_worker_is_illegal(
    capsys: pytest.CaptureFixture[str],
    line: list[str],
    name: str,
    on: Callable[..., Any],
    flags: tuple[str, ...],
    key: str,
) -> None:
    code, found = plan(capsys, *line, *flags)
    assert (code, [one["key"] for one in found["problems"]]) == (1, [key])
    on()
    own = {"load": None} if "--ref-load" in flags else {}
    flags = () if own else flags
    with pytest.raises((AssertionError, precision_shim.PrecisionShimError)) as error:
        Trainer.of(name, *flags, **own)
    message = str(error.value)
    bare = key in ("--lr", "--ref-load")  # the trainer's own assertions
    assert bare or key.removeprefix("--").replace("-", "_") in message


@pytest.mark.usefixtures("one_process")
def test_a_scale_below_its_minimum_without_fp16_scaling(
    capsys: pytest.CaptureFixture[str], line: list[str], name: str, shim: Callable[..., Any]
) -> None:
    """The shim's first scale, 32768, may be below a minimum that the user wrote."""
    flags = ("--fp16", "--min-loss-scale", "65536")
    code, said = plan(capsys, "PRECISION_SHIM_FEATURES=-fp16-scaling", *line, *flags)
    assert (code, "initial_loss_scale=32768 is below min_loss_scale=65536" in said) == (2, True)
    shim(frameworks=name, features="-fp16-scaling", export=False)
    with pytest.raises(precision_shim.SettingsError, match="is below min_loss_scale=65536"):
        Trainer.of(name, *flags)


CHECKED = [
    (("--eval-interval", "3"), "Evaluation datasets must be configured"),
    (("--save-interval", "3"), "'--save' is required"),
    (("--pipeline-model-parallel-size", "0"), "--pipeline-model-parallel-size 0: expected"),
    (("--use-kl-loss", "--ref-load", ""), "expected --ref-load"),
    (("--debug-rollout-only",), "--debug-rollout-only needs --rollout-num-gpus"),
    (("--num-distributed-optimizer-instances", "2"), "not planned"),
    (("--lr", "-1"), "assert args.min_lr <= args.lr"),
]


@pytest.mark.parametrize(("flags", "why"), CHECKED, ids=str)
def test_the_trainers_own_checks(
    capsys: pytest.CaptureFixture[str], line: list[str], flags: tuple[str, ...], why: str
) -> None:
    code, said = plan(capsys, *line, *flags)
    assert (code, why in said) == (2, True)


def test_flags_are_compared_with_the_models_config(
    capsys: pytest.CaptureFixture[str], line: list[str], tmp_path: Path
) -> None:
    line = [*line, "--ffn-hidden-size", "64"]
    code, found = plan(capsys, *line, "--hf-checkpoint", hub_config(tmp_path))
    assert code == 0
    assert not any("not compared" in note for note in found["notes"])
    code, found = plan(capsys, *line)
    assert any("not compared with the flags" in note for note in found["notes"])
    capsys.readouterr()
    other = hub_config(tmp_path, num_key_value_heads=1)
    with pytest.raises(SystemExit):
        main(["plan", "--json", "--", *line, "--hf-checkpoint", other])
    (note,) = json.loads(capsys.readouterr().out)["models"][0]["notes"]
    assert "--num-query-groups 2, in config.json 1" in note
    other = hub_config(tmp_path, hidden_size=32)
    code, said = plan(capsys, *line, "--hf-checkpoint", other)
    assert (code, "hidden_size in hf config 32" in said) == (2, True)


def test_a_job_that_only_generates_trains_no_model(
    capsys: pytest.CaptureFixture[str], line: list[str]
) -> None:
    code, found = plan(capsys, *line, "--debug-rollout-only", "--rollout-num-gpus", "8")
    assert (code, found["models"]) == (0, [])
    assert any("--debug-rollout-only" in note for note in found["notes"])


def test_variables_of_the_line_are_read(
    capsys: pytest.CaptureFixture[str], line: list[str], name: str
) -> None:
    if name != "miles":
        pytest.skip("slime's parser reads no variable")
    code, said = plan(capsys, "MILES_BACKEND=megatron", *line)
    assert (code, "`MILES_BACKEND` is deprecated" in said) == (2, True)


def test_the_vocabulary_is_padded(
    capsys: pytest.CaptureFixture[str], line: list[str], tmp_path: Path
) -> None:
    more = ("--ffn-hidden-size", "64", "--hf-checkpoint", hub_config(tmp_path))
    with pytest.raises(SystemExit) as end:
        main(["plan", "--json", "--", *line, *more, "--tensor-model-parallel-size", "2"])
    assert (end.value.code, json.loads(capsys.readouterr().out)["problems"]) == (0, [])


FROM_FILE = [
    ({"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"}, "", "runs"),
    ({"grad_reduce_in_bf16": True}, "", "runs"),
    ({"exp_avg_dtype": "bf17"}, "--exp-avg-dtype", "bf17"),
    ({"fp16": True}, "fp16", "bf16"),
    ({"params_dtype": "fp16"}, "params_dtype", "fp16"),
    ({"lr_decay_style": "foo"}, "--lr", "foo decay style"),
    (
        {"overlap_param_gather_with_optimizer_step": True},
        "--overlap-param-gather-with-optimizer-step",
        "list index out of range",
    ),
]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(("overrides", "key", "ends"), FROM_FILE, ids=str)
def test_values_of_a_role_come_after_all_checks(
    capsys: pytest.CaptureFixture[str],
    line: list[str],
    name: str,
    on: Callable[..., Any],
    tmp_path: Path,
    overrides: dict[str, Any],
    key: str,
    ends: str,
) -> None:
    if name != "slime":
        pytest.skip("miles has no such file")
    given = one_role(tmp_path, **overrides)
    _, found = plan(capsys, *line, "--actor-num-gpus-per-node", "1", *given)
    assert [one["key"] for one in found["problems"]] == ([key] if key else [])
    on()
    if key:
        with pytest.raises(Exception, match=ends):
            Trainer.of(name, **overrides)
        return
    Trainer.of(name, **overrides)
    planned = {one["feature"]: one["chosen"] for one in found["models"][0]["decisions"]}
    done = {one.feature: one.chosen for one in precision_shim.status().decisions}
    assert {key: planned[key] for key in planned} == {key: done[key] for key in planned}


def proposed(said: str) -> list[str]:
    """The words of the lines that a search proposes."""
    return [
        word for line in said.splitlines() if line.startswith("    --") for word in line.split()
    ]


@pytest.mark.parametrize(
    ("flags", "least"),
    [((), 4), (("--accumulate-allreduce-grads-in-fp32",), 1), (("--fp16",), 0)],
    ids=str,
)
def test_the_trainer_accepts_each_line_that_a_search_proposes(
    line: list[str], name: str, flags: tuple[str, ...], least: int
) -> None:
    words = (*line[line.index("python3") + 2 :], *flags, "--advantage-estimator", "ppo")
    options = command.Options(parameters="1B")
    job = command.Job(name, "train.py", None, (), words, {}, resolve(environ={}), options)
    rules = request.Rules("2.20", "0.18.2")
    actor, critic = (one.variants(job, rules) for one in flag_plans.plan_job(job).models)
    assert [one.lines for one in actor] == [one.lines for one in critic]
    assert len(actor) == least
    for variant in actor:
        more = [word for text in variant.lines for word in text.split()]
        found = flag_parsers.parse(replace(job, arguments=(*words, *more))).roles["actor"]
        asked = variant.model.wishes.asked
        for field in ("use_precision_aware_optimizer", "optimizer_cpu_offload"):
            assert getattr(found, field) == bool(asked.get(field))
        assert found.use_precision_aware_optimizer
        in_fp32 = bool(variant.model.wishes.bucket_in_fp32)
        assert found.accumulate_allreduce_grads_in_fp32 == in_fp32


def test_a_search_changes_all_models_at_once(
    capsys: pytest.CaptureFixture[str], line: list[str]
) -> None:
    more = ("--advantage-estimator", "ppo")
    with pytest.raises(SystemExit) as end:
        main(["plan", "--parameters", "1B", "--gpu-memory", "12", "--search", "--", *line, *more])
    said = capsys.readouterr().out
    assert (end.value.code, "search: it fits 12 GB with these lines" in said) == (0, True)
    words = proposed(said)
    assert words[0] == "--use-precision-aware-optimizer"
    with pytest.raises(SystemExit) as end:
        main(
            [
                "plan",
                "--parameters",
                "1B",
                "--gpu-memory",
                "12",
                "--search",
                "--",
                *line,
                *more,
                *words,
            ]
        )
    assert "search: it fits 12 GB as it is" in capsys.readouterr().out
