"""Plans made through each framework's own loader, in the environment that has the framework."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from precision_shim_adapters.megatron.installed import needs_gather
from precision_shim_adapters.verl import config as verls
from precision_shim_tools.plan.megatron.layout import count
from precision_shim_tools.plan.megatron.sizes import Sizes

from ..every_framework import in_force
from ..every_framework.walks import walking
from ..processes.commands import command, python
from .models import QWEN3_30B_A3B
from .rows import (
    ACTOR,
    DTENSOR,
    FSDP,
    GRPO,
    GRPO_ON_MEGATRON,
    LLAMA,
    MIXED,
    NEMO_RL,
    NEMO_RL_ON_MEGATRON,
    PLANNED,
    REFUSED,
    SKYRL,
    VERL,
    needs,
    since,
)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a model and of ``job.yaml``, in which the job is planned."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    (tmp_path / "job.yaml").write_text(NEMO_RL.format(model=tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planned(*words: str) -> tuple[int, dict[str, Any]]:
    code, out, err = command("plan", "--json", *words)
    assert code in (0, 1), err
    return code, json.loads(out)


def refused(*words: str) -> str:
    """What the command says about a job that it cannot plan."""
    code, out, err = command("plan", "--parameters", "1M", *words)
    assert code == 2, out
    return err


def gib(stage: dict[str, Any]) -> float:
    return round(stage["totals"]["bytes"] / 2**30, 2)


def subjects(plan: dict[str, Any]) -> list[str]:
    return [one["subject"] for one in plan["models"]]


def told_masters(plan: dict[str, Any], key: str) -> None:
    """The plan is legal, and warns that bf16 weights without masters lose Adam's updates."""
    (told,) = plan["models"][0]["warnings"]
    assert "keeps 0 of the 8 bits of Adam's update at lr 1e-06, and 98.1% of the updates" in told
    assert f" {key} " in told
    assert not plan["problems"]


def scaling(plan: dict[str, Any], model: int = 0) -> list[tuple[str, str]]:
    """The decisions about a model's loss scaling, each with its reason."""
    return [
        (one["chosen"], one["because"])
        for one in plan["models"][model]["decisions"]
        if one["feature"] == "fp16-scaling"
    ]


def check_fp8(plain: Sequence[str], *more: str, gathers: bool = True) -> None:
    """Persistent fp8 parameters get fp32 states, and the precision-aware optimizer is illegal.

    The last of ``more`` turns the precision-aware optimizer on. ``gathers``: whether the framework
    sets ``fp8_param_gather``.
    """
    lacks = {"fp8_param_gather"} if needs_gather() and not gathers else set()
    code, plan = planned("--", *plain, *more[:-1])
    (model,) = plan["models"]
    reason = next(d["because"] for d in model["decisions"] if d["feature"] == "bf16-dispatch")
    assert "fp8 or fp4 parameters: nothing is added" in reason
    parts = [part["components"] for part in model["with_shim"][0]["parts"]]
    for part in parts:
        assert part["params"]["dtypes"] == ["bf16", "fp8"]
        assert {part[one]["dtypes"][0] for one in ("master", "exp_avg", "exp_avg_sq")} == {"fp32"}
    found = {one["key"].rpartition(".")[2] for one in plan["problems"]}
    assert (code, found) == (len(lacks), lacks)
    code, plan = planned("--", *plain, *more)
    found = {one["key"].rpartition(".")[2] for one in plan["problems"]}
    assert (code, found) == (1, {"use_precision_aware_optimizer"})


OURS = "loss scaling from 65536, growth x2 after 400 steps, backoff x0.5"
"""By the shim's own defaults."""


@pytest.mark.parametrize(("line", "problems", "notes", "silent", "built"), PLANNED)
def test_what_the_plan_tells(
    model: Path,
    line: Sequence[str],
    problems: dict[str, Sequence[str]],
    notes: Sequence[str | Sequence[str]],
    silent: Sequence[str],
    built: Sequence[str],
) -> None:
    code, plan = planned("--parameters", "1B", "--", *line)
    found = plan["problems"]
    told = {one["key"]: "{code} {subject}: {message}. {remedy}".format(**one) for one in found}
    assert (code, len(found), told.keys()) == (bool(problems), len(problems), problems.keys())
    for key, texts in problems.items():
        assert all(text in told[key] for text in texts), told[key]
    assert not built or subjects(plan) == built
    every = plan["notes"]
    every += [f"{one['subject']}: {note}" for one in plan["models"] for note in one["notes"]]
    for texts in notes:
        whole = isinstance(texts, str)
        (note,) = (
            one for one in every if (one == texts if whole else all(t in one for t in texts))
        )
        every.remove(note)
    assert [one for one in every if any(text in one for text in silent)] == []


@pytest.mark.parametrize(("line", "texts"), REFUSED)
def test_a_job_that_cannot_be_planned(line: Sequence[str], texts: Sequence[str]) -> None:
    said = refused("--", *line)
    assert all(text in said for text in texts), said
    assert "Report this line" not in said


# -- verl --------------------------------------------------------------------------------------

MEGATRON = (
    *VERL[:3],
    "--config-name=ppo_megatron_trainer",  # hydra takes overrides in one row
    *VERL[3:],
    "algorithm.adv_estimator=grpo",
    *(
        f"actor_rollout_ref.actor.megatron.{key}={value}"
        for key, value in (
            ("tensor_model_parallel_size", 2),
            ("pipeline_model_parallel_size", 2),
            ("expert_model_parallel_size", 8),
        )
    ),
)


@needs("verl")
def test_verl_on_megatron(model: Path) -> None:
    path = f"actor_rollout_ref.model.path={model}"
    code, plan = planned("--", *MEGATRON, path)
    assert (code, plan["framework"], plan["world_size"]) == (0, "verl", 64)
    assert subjects(plan) == ["actor"]
    (actor,) = plan["models"]
    assert actor["parameters"] == 30_532_122_624
    assert actor["layout"]["ep"] == 8
    states = "+actor_rollout_ref.actor.optim.override_optimizer_config"
    words = (
        f"{states}.use_precision_aware_optimizer=True",
        "+actor_rollout_ref.actor.megatron.override_ddp_config.grad_reduce_in_fp32=False",
        f"{states}.main_grads_dtype=bf16",
        f"{states}.exp_avg_dtype=bf16",
        f"{states}.exp_avg_sq_dtype=bf16",
    )
    _, low = planned("--", *MEGATRON, path, *words)
    assert gib(low["models"][0]["without"][0]) == 7.49
    assert (plan["unset"], actor["ends"]) == (True, "")
    assert "_dtype='bf16' is not turned into a dtype" in low["models"][0]["ends"]
    layers = "+actor_rollout_ref.actor.megatron.override_transformer_config"
    gather = "+actor_rollout_ref.actor.megatron.override_ddp_config.fp8_param_gather"
    eight = (*MEGATRON, path, f"{layers}.fp8=hybrid", f"{layers}.fp8_param=true")
    check_fp8(eight, f"{gather}=true", f"+{words[0].lstrip('+')}")
    code, plan = planned("--", *eight)
    keys = [one["key"] for one in plan["problems"]]
    assert (code, keys) == ((1, [gather.lstrip("+")]) if needs_gather() else (0, []))
    ref = ("actor_rollout_ref.actor.use_kl_loss=True", "algorithm.adv_estimator=gae")
    critic = f"critic.model.path={model}"
    _, three = planned("--", *MEGATRON, path, *ref, critic)
    assert subjects(three) == ["actor", "ref", "critic"]
    assert set(three["models"][1]["with_shim"][0]["parts"][0]["components"]) == {"frozen"}


@needs("verl")
def test_verl_on_fsdp_and_what_is_illegal(model: Path) -> None:
    path = f"actor_rollout_ref.model.path={model}"
    code, plan = planned("--", *VERL, "algorithm.adv_estimator=grpo", path)
    assert code == 0
    (part,) = plan["models"][0]["with_shim"][0]["parts"]
    assert part["components"]["params"]["dtypes"] == ["fp32"]
    assert part["components"]["params"]["sharded"] is True
    assert scaling(plan) == []
    assert plan["models"][0]["warnings"] == []
    stored = "actor_rollout_ref.actor.fsdp_config.model_dtype"
    low = ("--", *VERL, "algorithm.adv_estimator=grpo", path, f"{stored}=bf16")
    told_masters(planned(*low)[1], f"{stored}=fp32")
    optim = "actor_rollout_ref.actor.optim"
    rounds = (f"{optim}.optimizer_impl=torchao.optim", f"{optim}.optimizer=_AdamW")
    rounds += (f"+{optim}.override_optimizer_config.bf16_stochastic_round=true",)
    assert planned(*low, *rounds)[1]["models"][0]["warnings"] == []
    half = "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp16"
    reference = "actor_rollout_ref.actor.use_kl_loss=True"
    _, plan = planned("--", *VERL, "algorithm.adv_estimator=grpo", path, reference, half)
    assert scaling(plan, 1) == []
    own = Version(version("verl")) >= Version("0.8")
    instead = "verl's own scaler, counted and kept with the checkpoints"
    assert scaling(plan) == [(OURS, instead if own else "fp16 parameters")]
    _, two = planned("--", *VERL, "algorithm.adv_estimator=grpo", path, reference)
    assert subjects(two) == ["actor", "ref"]
    totals = two["models"][1]["with_shim"][0]["totals"]
    assert (totals["gpu"], totals["host"] > 0) == (0, True)
    for where in ("", "fsdp_config."):
        parts = f"actor_rollout_ref.actor.{where}ulysses_sequence_parallel_size=3"
        said = refused("--", *VERL, "algorithm.adv_estimator=grpo", path, parts)
        assert "64 GPUs are no multiple of 3, which is tensor x pipeline x context" in said
    optim = "actor_rollout_ref.actor.optim"
    for word, other in (
        (f"{optim}.optimizer_impl=bitsandbytes.optim", "'bitsandbytes.optim.AdamW'"),
        (f"+{optim}.override_optimizer_config.amsgrad=true", "'torch.optim.AdamW'"),
    ):
        said = refused("--", *VERL, "algorithm.adv_estimator=grpo", path, word)
        assert f"{other}: its states are not known here" in said
    three = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=3"
    assert "its layout cannot be computed: " in refused("--", *MEGATRON, path, three)


@needs("verl")
def test_verls_own_fields_take_other_names_without_the_shim(model: Path) -> None:
    native = Version(version("verl")) >= Version("0.9")
    optim = f"{'' if native else '+'}{ACTOR}.optim"
    line = (*MEGATRON, f"actor_rollout_ref.model.path={model}")
    low = (f"{optim}.use_precision_aware_optimizer=yes", f"{optim}.exp_avg_dtype=BF16")
    code, plan = planned("--", *line, *low)
    assert (code, plan["problems"]) == (0, [])
    told = "verl itself takes 32, bf16" if native else "McoreOptimizerConfig has no"
    assert told in plan["models"][0]["ends"]
    assert plan["models"][0]["with_shim"][0]["parts"][0]["components"]["exp_avg"]["dtypes"] == [
        "bf16"
    ]
    code, plan = planned("--", "PRECISION_SHIM=0", *line, *low)
    assert code == 1
    assert f"{ACTOR}.optim.exp_avg_dtype" in {one["key"] for one in plan["problems"]}
    code, plan = planned("--", *line, low[0].replace("yes", "'no'"))
    ((key, remedy),) = ((one["key"], one["remedy"]) for one in plan["problems"])
    assert (code, key) == (1, "optim.use_precision_aware_optimizer")
    assert "without quotes" in remedy


@needs("verl")
@since("0.8")  # the Automodel engine
def test_verls_other_engines(model: Path) -> None:
    here = Version(version("verl"))
    actor = ("algorithm.adv_estimator=grpo", f"actor_rollout_ref.model.path={model}")
    actor += ("model_engine=torchtitan", "actor_rollout_ref.actor.torchtitan.dtype=float16")
    actor += ("actor_rollout_ref.rollout.dtype=float16",)
    code, plan = planned("--", *VERL, *actor)
    notes = [one for one in plan["models"][0]["notes"] if "no loss scaler" in one]
    if here >= Version("0.9.0"):
        because = "dtype is float16, and verl's torchtitan engine has no loss scaler"
        assert (code, scaling(plan), notes) == (0, [(OURS, because)], [])
    else:  # before 0.9 this engine trains in bfloat16: the key has no effect, and a note says why
        codes = [one["code"] for one in plan["problems"]]
        assert (code, scaling(plan), len(notes), codes) == (1, [], 1, ["no-effect"])
    sft = ("python3", "-m", "verl.trainer.sft_trainer", "trainer.n_gpus_per_node=8")
    sft += ("engine=automodel", "optim=automodel", f"model.path={model}", "data.train_files=none")
    code, plan = planned("--", "PRECISION_SHIM_ROLLOUT=follow", *sft, "engine.mp_param_dtype=fp16")
    assert any("PRECISION_SHIM_ROLLOUT=follow has no effect" in note for note in plan["notes"])
    because = "mp_param_dtype is float16, and verl's automodel engine has no loss scaler"
    assert (code, scaling(plan)) == (0, [(OURS, because)])
    ddp = "engine.distributed_strategy=ddp"
    code, plan = planned("--", *sft, "engine.mp_param_dtype=fp16", ddp)
    assert (code, [one["key"] for one in plan["problems"]]) == (1, [ddp.partition("=")[0]])


@needs("verl")
@since("0.8")  # the VeOmni engine of older versions is refused
def test_verls_veomni_engine(model: Path) -> None:
    """VeOmni gathers fp32 parameters in fp16 and the shim scales the loss, or the plan refuses."""
    key = "actor_rollout_ref.actor.veomni"
    actor = ("algorithm.adv_estimator=grpo", f"actor_rollout_ref.model.path={model}")
    actor += ("model_engine=veomni", "actor_rollout_ref.actor.use_kl_loss=True")
    code, plain = planned("--", *VERL, *actor)
    assert (code, subjects(plain), scaling(plain)) == (0, ["actor", "ref"], [])
    half = f"+{key}.dtype=float16"  # verl's YAML lacks the key
    others = ("rollout.dtype", "ref.veomni.dtype")
    both = (*actor, *(f"++actor_rollout_ref.{one}=float16" for one in others))
    code, plan = planned("--", *VERL, *both, half)
    because = "dtype is float16, and verl's veomni engine has no loss scaler"
    assert (code, scaling(plan), scaling(plan, 1)) == (0, [(OURS, because)], [])
    (part,) = plan["models"][0]["with_shim"][0]["parts"]
    kept = {name: one["dtypes"] for name, one in part["components"].items()}
    assert {kept[name][0] for name in ("params", "exp_avg", "exp_avg_sq")} == {"fp32"}
    # The dtype in which parameters are gathered does not affect what is stored.
    assert plan["models"][0]["with_shim"] == plain["models"][0]["with_shim"]
    low = f"{key}.mixed_precision=False"
    code, plan = planned("--", *VERL, *both, half, low)
    assert code == 1
    (problem,) = (one for one in plan["problems"] if one["subject"] == "actor")
    assert problem["key"] == low.partition("=")[0]
    assert problem["remedy"] == f"Set {key}.mixed_precision=True."
    code, plan = planned("--", *VERL, *actor, low)  # bfloat16, as VeOmni trains it
    assert code == 0
    assert [one["models"][0]["reduces"] for one in (plan, plain)] == ["bf16", "fp32"]
    told_masters(plan, f"{key}.mixed_precision=true")


@needs("verl")
@since("0.9.1")
def test_verls_fsdp_turbo_engine(model: Path) -> None:
    actor = ("algorithm.adv_estimator=grpo", f"actor_rollout_ref.model.path={model}")
    actor += ("actor_rollout_ref.actor.strategy=fsdp_turbo",)
    code, plan = planned("--", *VERL, *actor)
    assert (code, scaling(plan)) == (0, [])
    key = "actor_rollout_ref.actor.fsdp_config.turbo_config.distributed.fsdp_plan.param_dtype"
    for reduce, told in (("bf16", "bf16"), ("null", "")):
        word = f"{key.replace('param', 'reduce')}={reduce}"
        _, plan = planned("--", *VERL, *actor, word)
        assert plan["models"][0]["reduces"] == told
    both = (f"{key}=fp16", "actor_rollout_ref.rollout.dtype=float16")
    code, plan = planned("--", *VERL, *actor, *both)
    own = key.partition("fsdp_config.")[2]
    because = f"{own} is float16, and verl's fsdp_turbo engine has no loss scaler"
    assert (code, scaling(plan), plan["models"][0]["reduces"]) == (0, [(OURS, because)], "fp32")
    (part,) = plan["models"][0]["with_shim"][0]["parts"]
    assert part["components"]["params"]["dtypes"] == ["fp32"]
    said = refused("--", *VERL, *actor, f"{key}=half-and-half")
    assert f"{key}='half-and-half' is no dtype" in said


@needs("verl")
def test_verl_where_the_shim_is_not_in_force(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    """A shim that is not in force changes no figure of the plan, and the plan has no decision."""
    monkeypatch.setenv("PRECISION_SHIM_OPTIMIZER_STATES", "follow-model")
    path = f"actor_rollout_ref.model.path={model}"
    states = f"+{ACTOR}.optim.override_optimizer_config.adam_beta2=0.95"
    on_megatron = (*MEGATRON, path, states)
    on_fsdp = (*GRPO, path, f"+{MIXED}.param_dtype=fp16")
    (one,) = planned("--", *on_megatron)[1]["models"]
    assert one["without"] != one["with_shim"]
    assert {"bf16-dispatch", "grad-bucket-alignment"} <= {d["feature"] for d in one["decisions"]}
    assert scaling(planned("--", *on_fsdp)[1])
    # Versions before 0.9 have these fields only from the shim.
    native = Version(version("verl")) >= Version("0.9")
    key = f"{ACTOR}.optim.use_precision_aware_optimizer"
    for off in ("PRECISION_SHIM_FRAMEWORKS=skyrl", "PRECISION_SHIM=0"):
        plan = out_of_force(off, on_megatron, on_fsdp, f"{'' if native else '+'}{key}=true")
        assert (key in {one["key"] for one in plan["problems"]}) != native, off
    with contextlib.ExitStack() as stack:
        for pair in (
            ("bf16-dispatch", "megatron"),
            ("grad-bucket-alignment", "megatron"),
            ("fp16-scaling", fsdp_group_of_verl()),
        ):
            stack.enter_context(in_force.refused("verl", *pair))
        out_of_force("", on_megatron, on_fsdp)


def out_of_force(
    off: str, on_megatron: Sequence[str], on_fsdp: Sequence[str], *more: str
) -> dict[str, Any]:
    """The plan on Megatron where nothing is in force."""
    front = ("--", off) if off else ("--",)
    _, plan = planned(*front, *on_megatron, *more)
    (one,) = plan["models"]
    assert (one["without"], one["decisions"]) == (one["with_shim"], [])
    assert scaling(planned(*front, *on_fsdp)[1]) == []
    return plan


def fsdp_group_of_verl() -> str:
    """The group of the workers that a PPO job gets by default in the installed verl."""
    return "fsdp engine" if Version(version("verl")) >= Version("0.8") else "legacy fsdp workers"


@needs("verl")
def test_no_module_of_verls_or_megatrons_is_imported(model: Path) -> None:
    code = (
        "import sys\n"
        "from precision_shim_tools.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit as end:\n"
        "    print({'verl', 'megatron', 'ray'} & set(sys.modules), end.code)\n"
    )
    words = ("plan", "--parameters", "7B", "--json", "--", *VERL, "algorithm.adv_estimator=grpo")
    ended = python("-W", "ignore", "-c", code, *words)
    assert ended.stdout.splitlines()[-1] == "set() 0", ended.stderr


# -- SkyRL -------------------------------------------------------------------------------------


@needs("skyrl")
def test_skyrl(model: Path) -> None:
    words = (
        *SKYRL,
        "trainer.strategy=megatron",
        "trainer.placement.policy_num_nodes=8",
        "trainer.placement.policy_num_gpus_per_node=8",
        "generator.inference_engine.num_engines=64",
        f"trainer.policy.model.path={model}",
        f"trainer.ref.model.path={model}",
        "trainer.algorithm.use_kl_loss=false",
        "trainer.policy.megatron_config.tensor_model_parallel_size=2",
        "trainer.policy.megatron_config.pipeline_model_parallel_size=2",
        "trainer.policy.megatron_config.expert_model_parallel_size=8",
    )
    code, plan = planned("--", *words)
    assert (code, plan["world_size"], subjects(plan)) == (0, 64, ["policy"])
    assert gib(plan["models"][0]["without"][0]) == 12.57
    config = "trainer.policy.megatron_config"
    layers = f"{config}.transformer_config_kwargs"
    eight = [f"{layers}.{one}" for one in ("fp8=hybrid", "fp8_recipe=blockwise", "fp8_param=true")]
    gathers = Version(version("skyrl")) >= Version("0.4")
    if gathers:
        eight = [one.replace(".transformer_config_kwargs", "") for one in eight]
        eight += [f"{config}.ddp_config.fp8_param_gather=true"]
    aware = f"{config}.optimizer_config_kwargs.use_precision_aware_optimizer=true"
    check_fp8(words, *eight, aware, gathers=gathers)
    fsdp = [one for one in words if "megatron" not in one]
    code, plan = planned("--", *fsdp, "trainer.strategy=fsdp2")
    assert code == 0
    assert scaling(plan) == []
    half = "trainer.policy.fsdp_config.mixed_precision.param_dtype=fp16"
    _, scaled = planned("--", *fsdp, "trainer.strategy=fsdp2", half)
    key = "policy.fsdp_config.mixed_precision.param_dtype is fp16"
    assert scaling(scaled) == [(OURS, key), ("autocast to fp16", "it follows param_dtype")]
    assert plan["models"][0]["with_shim"][0]["parts"][0]["data_parallel_size"] == 64
    critic = f"trainer.critic.model.path={model}"
    apart = ("trainer.placement.colocate_all=false", "trainer.algorithm.use_kl_loss=true", critic)
    gpus = ("trainer.placement.ref_num_nodes=8", "trainer.placement.ref_num_gpus_per_node=8")
    code, plan = planned("--", *fsdp, "trainer.strategy=fsdp2", *apart, *gpus)
    assert code == 0
    assert subjects(plan) == ["policy", "ref", "critic"]
    parts = "trainer.policy.sequence_parallel_size=3"
    said = refused("--", *fsdp, "trainer.strategy=fsdp2", parts)
    assert "64 GPUs are no multiple of 3, which is tensor x pipeline x context" in said
    assert "nonsense" in refused("--", *words, "trainer.nonsense=1")


# -- NeMo-RL -----------------------------------------------------------------------------------


@needs("nemo_rl")
def test_the_walk_of_a_plan(tmp_path: Path) -> None:
    """Of a second plan: what the first one imports is no part of the walk."""
    (tmp_path / "job.yaml").write_text(NEMO_RL.format(model=tmp_path))
    job = ("uv", "run", "examples/nemo_rl/run_grpo.py", "--config", str(tmp_path / "job.yaml"))
    words = ("plan", "--parameters", "7.6B", "--", *job)
    command(*words)
    with walking("A plan"):
        ended = command(*words)
    assert ended.code == 0, ended.err


@needs("nemo_rl")
def test_nemo_rl(model: Path) -> None:
    (model / "job.yaml").rename(model / "parent.yaml")
    (model / "job.yaml").write_text("defaults: parent.yaml\n")
    words = ("uv", "run", "examples/nemo_rl/run_grpo.py", "--config", str(model / "job.yaml"))
    code, plan = planned("--", *words)
    assert (code, plan["framework"], plan["world_size"]) == (0, "nemo-rl", 64)
    assert gib(plan["models"][0]["without"][0]) == 9.27
    assert plan["models"][0]["without"][0]["parts"][0]["components"]["master"]["dtypes"] == [
        "int16"
    ]
    eight = "{enabled: true, fp8: e4m3, fp8_recipe: blockwise, fp8_param: true}"
    aware = "policy.megatron_cfg.optimizer.use_precision_aware_optimizer"
    eight = f"++policy.megatron_cfg.fp8_cfg={eight}"
    gathers = Version(version("nemo-rl")).release >= (0, 7)
    check_fp8(words, eight, f"{aware}=false", f"{aware}=true", gathers=gathers)
    off = ("policy.megatron_cfg.enabled=false", "policy.dtensor_cfg.enabled=true")
    code, plan = planned("--", *words, *off)
    assert code == 0
    assert plan["models"][0]["layout"] == {"fsdp": 32, "replicas": 1, "tp": 2}
    assert any("its 2 ranks in bf16, before FSDP" in one for one in plan["models"][0]["notes"])
    (part,) = plan["models"][0]["with_shim"][0]["parts"]
    assert scaling(plan) == []
    low = ("++policy.hf_config_overrides.dtype=bfloat16", "++policy.optimizer.kwargs.lr=1e-6")
    _, stored = planned("--", *words, *off, *low)
    if Version(version("nemo-rl")).release >= (0, 6):
        told_masters(stored, "policy.hf_config_overrides.dtype=float32")
    else:
        assert stored["models"][0]["warnings"] == []
    block = "++policy.precision_shim.growth_interval=0"
    code, plan = planned("--", *words, *off, block)
    assert (code, scaling(plan)) == (0, [])  # nor does a worker in bfloat16 read the setting
    half = ("policy.precision=float16", "++policy.precision_shim.growth_interval=7")
    _, scaled = planned("--", *words, *off, *half)
    because = "policy.precision is float16, and NeMo-RL does not scale the loss"
    assert scaling(scaled) == [(OURS.replace("400", "7"), because)]
    # NeMo-RL's YAML sets fp16: false and bf16: true
    _, scaled = planned("--", *words, *half)
    assert scaling(scaled) == [("no loss scaling", "the optimizer's config has fp16=False")]
    checks = Version(version("nemo-rl")) >= Version("0.5.0rc0")  # 0.4 has no such check
    assert ("flags" in {one["code"] for one in scaled["problems"]}) == checks
    flags = [f"policy.megatron_cfg.optimizer.{one}" for one in ("fp16=true", "bf16=false")]
    _, scaled = planned("--", *words, *half, *flags)
    assert "flags" not in {one["code"] for one in scaled["problems"]}
    megatrons = "Megatron's dynamic loss scaler from 32768, growth x2 after 7 steps, backoff x0.5"
    assert scaling(scaled) == [(megatrons, "the model is fp16")]
    said = refused("--", *words, *off, *half[:1], block)
    assert "policy.precision_shim.growth_interval: " in said
    copies = ("++policy.dtensor_cfg._v2=true", "++policy.dtensor_cfg.dp_replicate_size=2")
    code, plan = planned("--", *words, *off, *copies)
    assert (code, plan["models"][0]["layout"]["replicas"]) == (0, 2)
    (whole,) = plan["models"][0]["with_shim"][0]["parts"]
    assert whole["data_parallel_size"] == 16
    twice = 2 * part["components"]["exp_avg"]["bytes"]
    assert whole["components"]["exp_avg"]["bytes"] == pytest.approx(twice, abs=2)
    context = "++policy.dtensor_cfg.context_parallel_size=3"
    said = refused("--", *words, *off, context)
    assert "64 GPUs are no multiple of 6, which is tensor x pipeline x context" in said
    assert "none.yaml" in refused("--", *words[:-1], str(model / "none.yaml"))


WRONG = [
    pytest.param(GRPO, f"++{MIXED}.parm_dtype", marks=needs("verl")),
    pytest.param(
        (*SKYRL, "trainer.strategy=fsdp2"),
        "trainer.policy.fsdp_config.mixed_precision.buffer_dtype",
        marks=needs("skyrl"),
    ),
    pytest.param(DTENSOR, "++policy.precison", marks=needs("nemo_rl")),
]


@pytest.mark.parametrize(("line", "wrong"), WRONG, ids=lambda one: "")
def test_a_job_that_cannot_be_planned_is_checked_all_the_same(
    model: Path, line: tuple[str, ...], wrong: str
) -> None:
    words = ("plan", "--model", model / "nowhere", "--", *line, f"{wrong}=fp16")
    code, _, told = command(*words)
    assert code == 2
    assert "nowhere" in told
    assert f"{wrong.lstrip('+')}=fp16 has" in told


# -- LoRA ------------------------------------------------------------------------------------------

VERLS = "actor_rollout_ref.model"
_LOW = {True: "bf16", False: "fp32"}
QV = (8 * 48 * (2048 + 4096 + 2048 + 512), 0)
"""The trained parameters of a rank, besides experts and of experts: q_proj and v_proj adapted."""
BRIDGED = (8 * 24 * (2048 + 5120) // 2, 8 * 24 * (2048 + 1536) // 2)
"""Those of one of two stages: linear_qkv, and linear_fc1 of experts, which share one adapter."""


def _on_peft(package: str, line: Sequence[str], key: str, rank: str, dtypes: str) -> object:
    words = (*line, f"{key}.{rank}=8", f"{key}.target_modules=[q_proj,v_proj]")
    return pytest.param(words, QV, dtypes, marks=needs(package))


def _on_bridge(package: str, line: Sequence[str], key: str, rank: str) -> object:
    words = (*line, f"{key}.{rank}=8", f"{key}.target_modules=[linear_qkv,linear_fc1]")
    marks = since("0.6", package) if package == "nemo_rl" else needs(package)
    return pytest.param(words, BRIDGED, "bf16 over bf16", marks=marks)


SPLIT = [
    f"{size}_parallel_size={ways}"
    for size, ways in (
        ("tensor_model", 2),
        ("pipeline_model", 2),
        ("expert_model", 8),
        ("expert_tensor", 2),
    )
]
GPUS = [f"trainer.placement.policy_num_{one}=8" for one in ("nodes", "gpus_per_node")]
ADAPTED = [
    _on_peft("verl", GRPO, VERLS, "lora_rank", "fp32 over fp32"),
    _on_peft("verl", (*GRPO, f"{FSDP}.model_dtype=bf16"), VERLS, "lora_rank", "own over bf16"),
    _on_bridge(
        "verl",
        (
            *GRPO_ON_MEGATRON,
            *(f"{ACTOR}.megatron.{one}" for one in SPLIT),
            f"{ACTOR}.megatron.use_mbridge=True",
            f"++{ACTOR}.megatron.vanilla_mbridge=False",
        ),
        f"{VERLS}.lora",
        "rank",
    ),
    _on_peft(
        "skyrl",
        (*SKYRL, *GPUS, "trainer.strategy=fsdp2"),
        "trainer.policy.model.lora",
        "rank",
        "fp32 over fp32",
    ),
    _on_bridge(
        "skyrl",
        (
            *(*SKYRL, *GPUS, "trainer.strategy=megatron"),
            *(f"trainer.policy.megatron_config.{one}" for one in SPLIT),
        ),
        "trainer.policy.model.lora",
        "rank",
    ),
    pytest.param(
        (
            *DTENSOR,
            "++policy.dtensor_cfg._v2=true",
            "++policy.dtensor_cfg.lora_cfg.enabled=true",
            "++policy.dtensor_cfg.lora_cfg.dim=8",
            "++policy.dtensor_cfg.lora_cfg.target_modules=['*.q_proj','*.v_proj']",
        ),
        (QV[0] // 2, 0),
        "fp32 over fp32",
        marks=since("0.5", "nemo_rl"),
    ),
    _on_bridge(
        "nemo_rl",
        (*NEMO_RL_ON_MEGATRON, "++policy.megatron_cfg.peft.enabled=true"),
        "++policy.megatron_cfg.peft",
        "dim",
    ),
]


@pytest.mark.filterwarnings("ignore:LoRA is enabled")  # by SkyRL 0.2
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # by Automodel's import
@pytest.mark.parametrize(("line", "trained", "dtypes"), ADAPTED, ids=lambda one: "")
def test_adapters_train_over_a_frozen_model(
    model: Path, line: tuple[str, ...], trained: tuple[int, int], dtypes: str
) -> None:
    code, plan = planned("--model", str(model), "--", *line)
    one = plan["models"][0]
    parts = one["with_shim"][0]["parts"]
    assert (code, [part["parameters"] for part in parts]) == (0, [*filter(None, trained)])
    held = parts[0]["components"]
    if dtypes.startswith("own"):  # verl's, over weights in bf16
        dtypes = dtypes.replace("own", _LOW[Version(version("verl")) >= Version("0.9")])
    assert f"{held['params']['dtypes'][0]} over {held['frozen']['dtypes'][0]}" == dtypes
    assert one["parameters"] > 30_532_122_624  # without adapters


@needs("skyrl")
@pytest.mark.parametrize("strategy", ["fsdp2", "megatron"])
def test_fp16_by_the_flag_that_skyrl_lacks(strategy: str) -> None:
    line = (*SKYRL, f"trainer.strategy={strategy}", "trainer.algorithm.use_kl_loss=false")
    said = " ".join(refused("--", *line, "trainer.fp16=true").split())
    written = said.partition("Did you mean ")[2].partition("?")[0].split(" and ")
    code, plan = planned("--parameters", "1M", "--", *line, *written)
    assert (code, plan["models"][0]["computes"]) == (0, "fp16")


@pytest.mark.parametrize(
    ("line", "half", "without"),
    [
        pytest.param(GRPO, [f"++{MIXED}.param_dtype=fp16"], "nothing scales", marks=needs("verl")),
        pytest.param(
            GRPO_ON_MEGATRON,
            [f"{ACTOR}.megatron.dtype=float16"],
            "overflow ends the job with NotImplementedError",
            marks=needs("verl"),
        ),
        pytest.param(
            (*SKYRL, "trainer.strategy=fsdp2"),
            ["trainer.policy.fsdp_config.mixed_precision.param_dtype=fp16"],
            "nothing scales",
            marks=needs("skyrl"),
        ),
        pytest.param(
            (*SKYRL, "trainer.strategy=megatron", "trainer.bf16=false"),
            ["trainer.policy.megatron_config.transformer_config_kwargs.fp16=true"],
            "nothing scales",
            marks=needs("skyrl"),
        ),
        pytest.param(
            DTENSOR, ["policy.precision=float16"], "nothing scales", marks=needs("nemo_rl")
        ),
        pytest.param(
            DTENSOR[:4],
            [
                "policy.precision=float16",
                *(f"policy.megatron_cfg.optimizer.{flag}" for flag in ("fp16=true", "bf16=false")),
            ],
            "overflow ends the job, by check_for_nan_in_grad",
            marks=needs("nemo_rl"),
        ),
    ],
)
def test_fp16_that_cannot_train_without_the_shim(
    model: Path, line: tuple[str, ...], half: list[str], without: str
) -> None:
    _, plan = planned("--parameters", "1B", "--", *line, *half)
    decided = next(
        one for one in plan["models"][0]["decisions"] if one["feature"] == "fp16-scaling"
    )
    scales = decided["because"].startswith("verl's own scaler")
    assert (without in decided["without"]) is not scales


@needs("verl")
def test_an_engines_defaults_are_not_written() -> None:
    """verl's YAML of each engine, also where another engine is chosen."""
    from omegaconf import OmegaConf

    (verl,) = importlib.util.find_spec("verl").submodule_search_locations
    files = list(Path(verl, "trainer", "config", "engine").glob("*.yaml"))
    assert {"fsdp", "megatron"} <= {file.stem for file in files}
    for file in files:
        for strategy in (file.stem, "fsdp2", "fsdp_turbo"):
            config = OmegaConf.to_container(OmegaConf.load(file))
            asked = list(verls.ModelConfig(config, strategy).written())
            assert asked == [], (file.stem, strategy)


@needs("skyrl")
def test_settings_that_nothing_in_a_job_reads_are_noted() -> None:
    settings = {"GRAD_BUCKET": "align", "OPTIMIZER_STATES": "follow-model", "GROWTH_INTERVAL": "7"}
    settings["ROLLOUT"] = "follow"
    front = [f"PRECISION_SHIM_{name}={value}" for name, value in settings.items()]
    half = ["trainer.bf16=false"]
    half += ["trainer.policy.megatron_config.transformer_config_kwargs.fp16=true"]
    bare = "PRECISION_SHIM_FEATURES=-rollout-agreement"
    for words, idle in (
        (
            (*SKYRL, "trainer.strategy=fsdp2"),
            {"GRAD_BUCKET", "OPTIMIZER_STATES", "GROWTH_INTERVAL"},
        ),
        ((*SKYRL, "trainer.strategy=megatron"), {"GROWTH_INTERVAL"}),
        ((*SKYRL, "trainer.strategy=megatron", *half), set()),
        ((bare, *SKYRL, "trainer.strategy=megatron"), {"GROWTH_INTERVAL", "ROLLOUT"}),
    ):
        code, plan = planned("--parameters", "1B", "--", *front, *words)
        noted = [one for one in plan["notes"] if "has no effect on this job" in one]
        told = {name for name in settings if any(f"_{name}=" in one for one in noted)}
        assert (code, told, len(noted)) == (0, idle, len(idle)), words


REWARDED = """
env: {{reward_model: {{resources: {{gpus_per_node: 2, num_nodes: 3}}}}}}
{data}
policy:
  model_name: {model}
  precision: bfloat16
  dtensor_cfg: {{enabled: true}}
  generation: {{colocated: {{enabled: {colocated}, resources: {{gpus_per_node: {generating}}}}}}}
cluster: {{gpus_per_node: 8, num_nodes: {nodes}}}
"""


@needs("nemo_rl")
@pytest.mark.parametrize(
    "data", ["data: {env_name: reward_model}", "data: {default: {env_name: reward_model}}"]
)
@pytest.mark.parametrize(
    ("colocated", "generating", "nodes", "expected"),
    [("true", "null", 1, 6), ("false", 4, 1, 2), ("true", "null", 8, 40)],
)
def test_a_reward_model_has_gpus_of_its_own(
    model: Path, data: str, colocated: str, generating: object, nodes: int, expected: int
) -> None:
    text = REWARDED.format(
        data=data, model=model, colocated=colocated, generating=generating, nodes=nodes
    )
    (model / "job.yaml").write_text(text)
    words = ("--", "python", "examples/nemo_rl/run_grpo.py", "--config", str(model / "job.yaml"))
    assert planned(*words)[1]["world_size"] == expected
    (model / "job.yaml").write_text(text.replace("env_name: reward_model", "env_name: math"))
    assert planned(*words)[1]["world_size"] == expected + (24 if nodes > 1 else 2)


@needs("nemo_rl")
def test_a_reward_model_that_is_trained_has_one_output(model: Path) -> None:
    (model / "job.yaml").write_text(
        f"policy: {{model_name: {model}, precision: bfloat16, dtensor_cfg: {{enabled: true}}, "
        "reward_model_cfg: {enabled: true}}\ncluster: {gpus_per_node: 8, num_nodes: 1}\n"
    )
    words = ("--", "python", "examples/nemo_rl/run_rm.py", "--config", str(model / "job.yaml"))
    (part,) = planned(*words)[1]["models"][0]["with_shim"][0]["parts"]
    output = QWEN3_30B_A3B["hidden_size"] * (QWEN3_30B_A3B["vocab_size"] - 1)
    assert part["parameters"] == 30_532_122_624 - output


TEACHING = """
on_policy_distillation:
  enabled: true
  teacher_model_by_agent_name: {{one: first, two: second, three: first}}
  non_colocated_teachers:
    enabled: true
    default_teacher_cfg: {{num_nodes: 1}}
    teacher_overrides: {{two: {{num_nodes: 2}}}}
policy:
  model_name: {model}
  precision: bfloat16
  dtensor_cfg: {{enabled: true}}
  generation: {{colocated: {{enabled: false, resources: {{gpus_per_node: 8, num_nodes: 1}}}}}}
cluster: {{gpus_per_node: 8, num_nodes: 6}}
"""


@needs("nemo_rl")
def test_teachers_with_nodes_of_their_own_leave_the_rest(model: Path) -> None:
    (model / "job.yaml").write_text(TEACHING.format(model=model))
    words = ("--", "python", "examples/nemo_rl/run_grpo.py", "--config", str(model / "job.yaml"))
    assert planned(*words)[1]["world_size"] == 16


TEACHERS = """
teacher: null
teachers:
  - {{model_name: {model}, precision: bfloat16, dtensor_cfg: {{enabled: true}}}}
  - {{model_name: {model}, precision: bfloat16, dtensor_cfg: {{enabled: true}}}}
policy:
  model_name: {model}
  precision: bfloat16
  dtensor_cfg: {{enabled: true}}
  generation: {{colocated: {{enabled: true}}}}
cluster: {{gpus_per_node: 8, num_nodes: 1}}
"""


@needs("nemo_rl")
def test_each_of_several_teachers_is_a_model(model: Path) -> None:
    (model / "job.yaml").write_text(TEACHERS.format(model=model))
    words = ("python", "examples/nemo_rl/run_xtoken.py", "--config", str(model / "job.yaml"))
    _, plan = planned("--", *words)
    assert subjects(plan) == ["policy", "teacher_0", "teacher_1"]
    for one in plan["models"][1:]:
        (part,) = one["with_shim"][0]["parts"]
        assert set(part["components"]) == {"frozen"}


# -- torchtitan --------------------------------------------------------------------------------


@needs("torchtitan")
def test_torchtitan() -> None:
    words = ("torchrun", "--nproc-per-node=8", "-m", "torchtitan.train", "--module", "qwen3")
    code, plan = planned("--", *words, "--config", "qwen3_debugmodel")
    assert (code, plan["framework"], plan["world_size"]) == (0, "torchtitan", 8)
    _, follows = planned(
        "--", "PRECISION_SHIM_ROLLOUT=follow", *words, "--config", "qwen3_debugmodel"
    )
    (note,) = {*follows["notes"]} - {*plan["notes"]}  # the job has no rollout
    assert note.startswith("PRECISION_SHIM_ROLLOUT=follow has no effect on this job")
    (part,) = plan["models"][0]["with_shim"][0]["parts"]
    assert part["data_parallel_size"] == 8
    assert part["components"]["exp_avg"]["dtypes"] == ["fp32"]
    words += ("--config", "qwen3_debugmodel", "--optimizer.implementation=fused_opt_states_bf16")
    (low,) = planned("--", *words)[1]["models"][0]["with_shim"][0]["parts"]
    for name in ("exp_avg", "exp_avg_sq"):
        assert low["components"][name]["dtypes"] == ["bf16"]
        assert 2 * low["components"][name]["bytes"] == part["components"][name]["bytes"]
    refused("--", *words, "--config", "nonsense")


@needs("torchtitan")
def test_what_a_config_prints_as_it_is_read_is_not_in_the_json(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Importing torchtitan's RL configs imports Monarch and vLLM, which both log to stdout."""
    (tmp_path / "talking.py").write_text(
        "print('a line')\nfrom torchtitan.models.llama3.config_registry import llama3_debugmodel\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ("-m", "torchtitan.train", "--module", "talking", "--config", "llama3_debugmodel")
    code, _ = planned("--", "torchrun", "--nproc-per-node=8", *words)
    assert code == 0


@needs("torchtitan")
@pytest.mark.filterwarnings("ignore:The 'torch' module")  # Monarch's, which the import also makes
def test_the_package_that_a_config_of_torchtitans_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "own_configs.py").write_text("import torchtitan_lacks_this\n")
    monkeypatch.syspath_prepend(tmp_path)
    rl = ("--", "python3", "-m", "torchtitan.experiments.rl.train", "--config=x", "--module")
    expected = "lacks a package here: No module named 'torchtitan_lacks_this'. Install"
    assert expected in refused(*rl, "own_configs")
    assert "Cannot import module 'nowhere'" in refused(*rl, "nowhere")


@needs("torchtitan")
def test_torchtitan_in_bfloat16_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "from torchtitan.components.optimizer import default_adamw\n"
        "from torchtitan.models.llama3 import config_registry\n"
        "def llama3():\n"
        "    config = config_registry.llama3_debugmodel()\n"
        "    config.optimizer = default_adamw(lr=1e-6)\n"
        "    return config\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    line = ("torchrun", "--nproc-per-node=8", "-m", "torchtitan.train", "--module", "slow")
    low = ("--config", "llama3", "--training.dtype", "bfloat16")
    told_masters(planned("--", *line, *low)[1], "training.dtype=float32")
    assert planned("--", *line, *low[:2])[1]["models"][0]["warnings"] == []


@needs("torchtitan")
@pytest.mark.parametrize("name", ["float16", "half", "bf16"])
def test_torchtitan_reads_the_names_that_the_job_may_write(name: str) -> None:
    words = (*LLAMA, "--training.mixed_precision_param", name)
    code, plan = planned("--", "torchrun", "--nproc-per-node=8", *words)
    assert (code, plan["problems"]) == (0, [])
    assert plan["models"][0]["with_shim"] == plan["models"][0]["without"]
    because = "training.mixed_precision_param is float16, and torchtitan does not scale the loss"
    assert scaling(plan) == ([] if name == "bf16" else [(OURS, because)])
    assert f"invalid choice '{name}'" in plan["models"][0]["ends"]


@needs("torchtitan")
def test_torchtitan_alone_refuses_them_with_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRECISION_SHIM_FEATURES", "-dtype-coercion")
    said = refused("--", "torchrun", *LLAMA, "--training.mixed_precision_param=float16")
    assert "invalid choice 'float16' for argument '--training.mixed-precision-param'" in said
    assert "vLLM" not in said


@needs("torchtitan")
@pytest.mark.parametrize("ways", [2, 3, 6])
def test_experts_that_torchtitan_cannot_spread(ways: int) -> None:
    """The model has 64 experts, and the number of ranks must divide them."""
    model = ("--module", "qwen3", "--config", "qwen3_moe_debug")
    words = ("-m", "torchtitan.train", *model, "--training.disable_cuda_graphs")
    degree = f"--parallelism.expert_parallel_degree={ways}"
    line = ("--", "torchrun", "--nproc-per-node=6", *words, degree)
    code, _, err = command("plan", *line)
    told = "it does not divide 64 experts" in err
    assert (code, told) == ((0, False) if ways == 2 else (2, True))


@needs("torchtitan")
def test_torchtitans_adapters_train_over_a_frozen_model() -> None:
    from torchtitan.components.lora import LoRAConverter
    from torchtitan.models.llama3 import model_registry

    from precision_shim_tools.plan.torchtitan import built

    adapters = LoRAConverter.Config(rank=8, alpha=16.0, target_modules=["wq", "wo"])
    model = built(model_registry("debugmodel", converters=[adapters]))
    assert {weight.trains for weight in model.weights} == {True, False}
    assert all(weight.trains == ("lora" in weight.name) for weight in model.weights)
    (stage,) = count(model, Sizes(8))
    assert stage.dense == sum(weight.numel for weight in model.weights if weight.trains)
    assert stage.frozen == model.parameters - stage.dense


@needs("torchtitan")
def test_the_stages_of_torchtitans_pipeline_have_the_whole_model() -> None:
    line = ("torchrun", "--nproc-per-node=8", *LLAMA, "--training.disable_cuda_graphs")
    line += ("--parallelism.pipeline_parallel_degree",)
    (whole,) = planned("--", *line, "1")[1]["models"][0]["with_shim"]
    _, plan = planned("--", *line, "2")
    assert plan["world_size"] == 8
    assert plan["models"][0]["layout"] == {"fsdp": 4, "replicas": 1, "tp": 1, "pp": 2}
    stages = [stage["parts"][0]["components"]["params"] for stage in plan["models"][0]["with_shim"]]
    params = whole["parts"][0]["components"]["params"]
    assert sum(one["group_bytes"] for one in stages) == params["group_bytes"]
    assert stages[0]["group_bytes"] != stages[1]["group_bytes"]
    _, plan = planned("--parameters", "8B", "--", *line, "2")
    for stage in plan["models"][0]["with_shim"]:
        assert stage["parts"][0]["components"]["params"]["group_bytes"] == 4 * 4 * 10**9
    line += ("4", "--parallelism.pipeline_parallel_layers_per_stage")
    assert "layers_per_stage=5" in refused("--", *line, "5")


@needs("torchtitan")
def test_a_config_of_torchtitans_for_a_newer_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "newer.py").write_text(
        "from torchtitan.models.llama3 import config_registry\n"
        "from torchtitan.tools.utils import has_cuda_capability\n"
        "def llama3():\n"
        "    if not (has_cuda_capability(8, 9) and has_cuda_capability(10, 0)):\n"
        "        raise ValueError('too old')\n"
        "    return config_registry.llama3_debugmodel()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    line = ("torchrun", "--nproc-per-node=8", "-m", "torchtitan.train", "--module", "newer")
    for _ in range(2):  # the first answer is taken back
        notes = planned("--", *line, "--config", "llama3")[1]["notes"]
        assert "torchtitan refuses this config on GPUs older than sm_100" in notes
    assert not any("sm_" in note for note in planned("--", *line[:-2], *LLAMA[2:])[1]["notes"])


@needs("verl")
def test_verls_sections_without_keys() -> None:
    """A section that only the job can resolve is left out; any other without keys is an error."""
    line = (*VERL, "algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=true")
    keys = ("actor_rollout_ref.ref.fsdp_config", "critic.optim", "critic.model")
    words = [f"{key}=${{oc.env:SET_IN_THE_JOB_ALONE}}" for key in keys]
    _, plan = planned("--parameters", "1M", "--", *line, *words)
    assert subjects(plan) == ["actor", "ref", "critic"]
    (note,) = [note for note in plan["notes"] if note.startswith("not resolved")]
    assert all(key in note for key in keys)
    for key in keys:
        assert f"{key}='abc'" in refused("--", *line, f"{key}=abc")


@needs("verl")
@pytest.mark.parametrize("place", ["fsdp_config", "model.fsdp_config"])
def test_verls_critic_is_read_where_the_release_has_its_engine(place: str) -> None:
    """verl 0.7.1 has the critic's FSDP section in ``critic.model``."""
    section: dict[str, object] = {"model_dtype": "bf16"}
    for name in reversed(place.split(".")):
        section = {name: section}
    read = verls.of_role(section, "critic")
    assert (read.engine_key, read.engine) == (f"critic.{place}", {"model_dtype": "bf16"})
