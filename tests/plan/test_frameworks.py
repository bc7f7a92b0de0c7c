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

from precision_shim.errors import PlanError
from precision_shim_adapters.megatron.installed import needs_gather
from precision_shim_adapters.verl import config as verls

from ..every_framework import in_force
from ..processes.commands import command, python
from .models import QWEN3_30B_A3B


def needs(package: str) -> pytest.MarkDecorator:
    found = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not found, reason=f"{package} is not installed")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
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
    parts = [part["components"] for part in model["after"][0]["parts"]]
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


# -- verl --------------------------------------------------------------------------------------

VERL = ("python3", "-m", "verl.trainer.main_ppo", "trainer.nnodes=8", "trainer.n_gpus_per_node=8")
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
    assert gib(low["models"][0]["before"][0]) == 7.49
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
    assert set(three["models"][1]["after"][0]["parts"][0]["components"]) == {"frozen"}


@needs("verl")
def test_verl_on_fsdp_and_what_is_illegal(model: Path) -> None:
    path = f"actor_rollout_ref.model.path={model}"
    code, plan = planned("--", *VERL, "algorithm.adv_estimator=grpo", path)
    assert code == 0
    (part,) = plan["models"][0]["after"][0]["parts"]
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
    totals = two["models"][1]["after"][0]["totals"]
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


ACTOR = "actor_rollout_ref.actor"
MIXED = f"{ACTOR}.fsdp_config.mixed_precision"


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
    assert plan["models"][0]["after"][0]["parts"][0]["components"]["exp_avg"]["dtypes"] == ["bf16"]
    code, plan = planned("--", "PRECISION_SHIM=0", *line, *low)
    assert code == 1
    assert f"{ACTOR}.optim.exp_avg_dtype" in {one["key"] for one in plan["problems"]}
    code, plan = planned("--", *line, low[0].replace("yes", "'no'"))
    ((key, remedy),) = ((one["key"], one["remedy"]) for one in plan["problems"])
    assert (code, key) == (1, "optim.use_precision_aware_optimizer")
    assert "without quotes" in remedy


@needs("nemo_rl")
def test_what_nemo_rl_refuses_of_an_offloaded_optimizer(model: Path) -> None:
    (model / "job.yaml").write_text(NEMO_RL.format(model=model))
    words = (*DTENSOR[:3], str(model / "job.yaml"))
    optimizer = "policy.megatron_cfg.optimizer"
    for fraction, offload, refused in (
        ("1.0", "true", []),
        ("0.5", "true", [f"{optimizer}.optimizer_offload_fraction"]),
        ("0.5", "false", []),
        ("1.0", "'false'", [f"{optimizer}.optimizer_cpu_offload"]),
    ):
        more = (f"offload_fraction={fraction}", f"cpu_offload={offload}")
        _, plan = planned("--", *words, *(f"++{optimizer}.optimizer_{one}" for one in more))
        assert [one["key"] for one in plan["problems"]] == refused


@needs("verl")
def test_a_key_in_a_wrong_section_of_verls_is_told_where_it_belongs() -> None:
    remedies = {
        "mixed_precision": f"Write {MIXED}, or",
        "fsdp_config.param_dtype": f"Write {MIXED}.param_dtype, or",
        "param_dtype": f"Write {MIXED}.param_dtype, or",
        "fsdp_config.lr": f"Write {ACTOR}.optim.lr, or",
        "optim.lrr": f"Did you mean {ACTOR}.optim.lr? Correct",
        "optim.override_optimizer_config.exp_avg_dtype": f"Leave {ACTOR}.optim.override_optimizer",
    }
    words = [f"+{ACTOR}.{key}=fp16" for key in remedies]
    words[0] = f"+{ACTOR}.mixed_precision.param_dtype=fp16"
    code, plan = planned("--parameters", "1M", "--", *GRPO, *words)
    assert (code, {one["code"] for one in plan["problems"]}) == (1, {"key"})
    told = {one["key"].removeprefix(f"{ACTOR}."): one["remedy"] for one in plan["problems"]}
    assert told.keys() == remedies.keys()
    for key, remedy in remedies.items():
        assert told[key].startswith(remedy)


@needs("verl")
@pytest.mark.skipif(
    importlib.util.find_spec("verl") is None or Version(version("verl")) < Version("0.8"),
    reason="verl has the Automodel engine from 0.8",
)
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
@pytest.mark.skipif(
    importlib.util.find_spec("verl") is None or Version(version("verl")) < Version("0.8"),
    reason="the VeOmni engine of older versions is refused",
)
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
    (part,) = plan["models"][0]["after"][0]["parts"]
    kept = {name: one["dtypes"] for name, one in part["components"].items()}
    assert {kept[name][0] for name in ("params", "exp_avg", "exp_avg_sq")} == {"fp32"}
    # The dtype in which parameters are gathered does not affect what is stored.
    assert plan["models"][0]["after"] == plain["models"][0]["after"]
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
@pytest.mark.skipif(
    importlib.util.find_spec("verl") is None or Version(version("verl")) < Version("0.9.1"),
    reason="verl has the FSDP Turbo engine from 0.9.1",
)
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
    (part,) = plan["models"][0]["after"][0]["parts"]
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
    assert one["before"] != one["after"]
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
    assert (one["before"], one["decisions"]) == (one["after"], [])
    assert scaling(planned(*front, *on_fsdp)[1]) == []
    return plan


def fsdp_group_of_verl() -> str:
    """The group of the workers that a PPO job gets by default in the installed verl."""
    return "fsdp engine" if Version(version("verl")) >= Version("0.8") else "legacy fsdp workers"


@needs("verl")
def test_verls_config_is_named_where_it_cannot_be_read() -> None:
    said = refused("--", *VERL, "actor_rollout_ref.nonsense=1")
    assert "ppo_trainer.yaml" in said
    assert "nonsense" in said


@needs("verl")
@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("actor_rollout_ref.model.lora_rank=some", "'some'"),
        ("actor_rollout_ref.actor.fsdp_config.fsdp_size=all", "'all'"),
        ("actor_rollout_ref.actor=null", "NoneType"),
    ],
)
def test_a_value_of_another_kind_is_no_traceback(word: str, expected: str) -> None:
    said = refused("--", *VERL, word)
    assert expected in said
    assert "Write" in said
    assert "Report this line" not in said


@needs("verl")
def test_an_entry_point_that_is_not_there() -> None:
    said = refused("--", "python", "-m", "verl.trainer.main_gone")
    assert "verl.trainer.main_gone: " in said
    assert "there is no such module or script here" in said


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

SKYRL = ("uv", "run", "-m", "skyrl.train.entrypoints.main_base")


@needs("skyrl")
def test_skyrls_sections_have_keys() -> None:
    said = refused("--", *SKYRL, "trainer.strategy=fsdp", "trainer.critic=null")
    assert "trainer.critic=None (NoneType): expected a section with keys" in said


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
    assert gib(plan["models"][0]["before"][0]) == 12.57
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
    assert plan["models"][0]["after"][0]["parts"][0]["data_parallel_size"] == 64
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

NEMO_RL = """
policy:
  model_name: {model}
  precision: bfloat16
  dtensor_cfg: {{enabled: false, tensor_parallel_size: 2}}
  optimizer: {{name: torch.optim.AdamW, kwargs: {{}}}}
  megatron_cfg:
    enabled: true
    tensor_model_parallel_size: 2
    pipeline_model_parallel_size: 2
    expert_model_parallel_size: 8
    expert_tensor_parallel_size: 2
    sequence_parallel: true
    optimizer: {{optimizer: adam, bf16: true, fp16: false, params_dtype: float32,
                adam_beta2: 0.999, use_distributed_optimizer: true,
                use_precision_aware_optimizer: true}}
    distributed_data_parallel_config: {{grad_reduce_in_fp32: false}}
cluster: {{gpus_per_node: 8, num_nodes: 8}}
"""


@needs("nemo_rl")
def test_nemo_rl(model: Path) -> None:
    (model / "parent.yaml").write_text(NEMO_RL.format(model=model))
    (model / "job.yaml").write_text("defaults: parent.yaml\n")
    words = ("uv", "run", "examples/nemo_rl/run_grpo.py", "--config", str(model / "job.yaml"))
    code, plan = planned("--", *words)
    assert (code, plan["framework"], plan["world_size"]) == (0, "nemo-rl", 64)
    assert gib(plan["models"][0]["before"][0]) == 9.27
    assert plan["models"][0]["before"][0]["parts"][0]["components"]["master"]["dtypes"] == ["int16"]
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
    (part,) = plan["models"][0]["after"][0]["parts"]
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
    (whole,) = plan["models"][0]["after"][0]["parts"]
    assert whole["data_parallel_size"] == 16
    twice = 2 * part["components"]["exp_avg"]["bytes"]
    assert whole["components"]["exp_avg"]["bytes"] == pytest.approx(twice, abs=2)
    context = "++policy.dtensor_cfg.context_parallel_size=3"
    said = refused("--", *words, *off, context)
    assert "64 GPUs are no multiple of 6, which is tensor x pipeline x context" in said
    assert "none.yaml" in refused("--", *words[:-1], str(model / "none.yaml"))


OPTIM = f"{ACTOR}.optim"
DTENSOR = (
    *("python3", "nemo_rl/run_grpo.py", "--config", "job.yaml"),
    *("++policy.megatron_cfg.enabled=false", "++policy.dtensor_cfg.enabled=true"),
)
OVERRIDES = "actor_rollout_ref.model.override_config"
KWARGS = "trainer.policy.megatron_config.optimizer_config_kwargs"
OVERRIDE = "critic.optim.override_optimizer_config"
GRPO = (*VERL, "algorithm.adv_estimator=grpo")
GRPO_ON_MEGATRON = (*VERL[:3], "--config-name=ppo_megatron_trainer", *GRPO[3:])
NATIVE = pytest.mark.skipif(
    importlib.util.find_spec("verl") is None or Version(version("verl")) < Version("0.9"),
    reason="verl has fields for the states' dtypes from 0.9",
)


@pytest.mark.parametrize(
    ("line", "written"),
    [
        pytest.param(
            GRPO_ON_MEGATRON, {f"++{OPTIM}.exp_avg_dtype": "bf16"}, marks=[needs("verl"), NATIVE]
        ),
        pytest.param(
            GRPO_ON_MEGATRON,
            {
                f"++{OPTIM}.exp_avg_dtype": "bf16",
                f"++{OPTIM}.use_precision_aware_optimizer": "true",
                f"++{OPTIM}.override_optimizer_config.exp_avg_dtype": "fp32",
            },
            marks=[needs("verl"), NATIVE],
        ),
        pytest.param(GRPO, {f"++{OVERRIDES}.torch_dtype": "float16"}, marks=needs("verl")),
        pytest.param(
            (*SKYRL, "trainer.strategy=megatron"),
            {
                f"{KWARGS}.main_grads_dtype": "bf16",
                f"{KWARGS}.use_precision_aware_optimizer": "true",
                f"{KWARGS.rpartition('.')[0]}.ddp_config.grad_reduce_in_fp32": "true",
            },
            marks=needs("skyrl"),
        ),
        pytest.param(
            DTENSOR[:4], {"++policy.hf_config_overrides.dtype": "float32"}, marks=needs("nemo_rl")
        ),
        pytest.param(
            DTENSOR,
            {"++policy.dtensor_cfg.mixed_precision.param_dtype": "float16"},
            marks=needs("nemo_rl"),
        ),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_a_dtype_that_has_no_effect_is_illegal(
    monkeypatch: pytest.MonkeyPatch, model: Path, line: tuple[str, ...], written: dict[str, str]
) -> None:
    monkeypatch.chdir(model)
    (model / "job.yaml").write_text(NEMO_RL.format(model=model))
    words = [f"{key}={value}" for key, value in written.items()]
    code, plan = planned("--parameters", "1B", "--", *line, *words)
    found = [one for one in plan["problems"] if one["code"] == "no-effect"]
    (key, *others) = [key.lstrip("+") for key in written]
    subject = "actor" if "actor" in key else "policy"
    assert (code, [(one["key"], one["subject"]) for one in found]) == (1, [(key, subject)])
    (other,) = others[-1:] or [key]
    assert other in found[0]["message"] + found[0]["remedy"]


@needs("verl")
def test_dtypes_that_fsdp_does_not_read_are_illegal() -> None:
    keys = [f"{ACTOR}.fsdp_config.wrap_policy{key}" for key in (".param_dtype", ".in.reduce_dtype")]
    keys += [f"{MIXED}.parm_dtype", f"{OVERRIDES}.model_config.dtype"]
    if Version(version("verl")) >= Version("0.9"):
        keys += [f"{ACTOR}.fsdp_config.dtype"]
    words = [f"++{key}=float16" for key in keys]
    code, plan = planned("--parameters", "1B", "--", *GRPO, *words)
    found = [(one["key"], one["subject"], one["code"]) for one in plan["problems"]]
    assert (code, sorted(found)) == (1, sorted((key, "actor", "no-effect") for key in keys))


@needs("skyrl")
@pytest.mark.parametrize("strategy", ["fsdp2", "megatron"])
def test_dtypes_that_a_strategy_of_skyrls_does_not_read_are_illegal(strategy: str) -> None:
    megatron = "trainer.policy.megatron_config"
    words = [f"{KWARGS}.exp_avg_dtype=bf16", f"{megatron}.ddp_config.grad_reduce_in_fp32=false"]
    words += ["trainer.policy.fsdp_config.mixed_precision.buffer_dtype=bf16"]
    if strategy == "megatron":
        layers = "transformer_config_kwargs"
        words = [
            f"{megatron}.{layers}.{one}" for one in ("params_dtype=fp32", "exp_avg_dtype=bf16")
        ]
        words += ["trainer.policy.fsdp_config.mixed_precision.param_dtype=fp16"]
        words += ["trainer.ref.megatron_config.optimizer_config_kwargs.exp_avg_dtype=bf16"]
        words += [f"trainer.ref.megatron_config.{layers}.exp_avg_dtype=bf16"]
    line = (*SKYRL, f"trainer.strategy={strategy}", "trainer.algorithm.use_kl_loss=true", *words)
    code, plan = planned("--parameters", "1B", "--", *line)
    found = {one["key"]: one["subject"] for one in plan["problems"] if one["code"] == "no-effect"}
    keys = [word.partition("=")[0] for word in words]
    assert (code, found) == (1, {key: "ref" if ".ref." in key else "policy" for key in keys})


@needs("skyrl")
@pytest.mark.parametrize("loss", ["true", "false"])
def test_skyrls_flag_on_fsdp_is_judged_for_the_reference_model_too(loss: str) -> None:
    line = (*SKYRL, "trainer.strategy=fsdp2", f"trainer.algorithm.use_kl_loss={loss}")
    code, plan = planned("--parameters", "1B", "--", *line, "trainer.bf16=false")
    found = [(one["key"], one["subject"]) for one in plan["problems"]]
    assert (code, found) == ((0, []) if loss == "true" else (1, [("trainer.bf16", "policy")]))


@needs("nemo_rl")
def test_a_misspelt_key_of_nemo_rls_bucket(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.chdir(model)
    (model / "job.yaml").write_text(NEMO_RL.format(model=model))
    key = "policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_fp32"
    code, plan = planned("--", *DTENSOR[:4], f"++{key}=true")
    ((found, remedy),) = ((one["key"], one["remedy"]) for one in plan["problems"])
    assert (code, found) == (1, key)
    assert "grad_reduce_in_fp32" in remedy


@needs("nemo_rl")
def test_precision_keys_that_nemo_rl_accepts_and_does_not_read(
    monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    monkeypatch.chdir(model)
    (model / "job.yaml").write_text(NEMO_RL.format(model=model))
    rollout, states = "policy.generation.vllm_cfg", "policy.megatron_cfg.optimizer"
    remedies = {
        "policy.precison": "policy.precision=float16",
        "policy.dtype": "policy.precision=float16",
        "policy.dtensor_cfg.precision": "policy.precision=float16",
        f"{rollout}.dtype": f"{rollout}.precision=float16",
        f"{states}.exp_avg_dtype": "",
        "policy.megatron_cfg.exp_avg_dtype": "",
        "policy.optimizer.exp_avg_dtype": "",
        "policy.dtensor_cfg.fsdp_output_dtype": "",
        "policy.generation.dtype": "",
    }
    read = (f"++{rollout}.precision=bfloat16",)
    if Version(version("nemo-rl")) >= Version("0.5.0rc0"):
        read += (f"++{rollout}.kv_cache_dtype=fp8",)
    read += ("++policy.generation.backend=vllm", f"++{states}.params_dtype=float32")
    read += ("++policy.megatron_cfg.moe_router_dtype=fp32",)
    words = [f"++{key}=float16" for key in remedies]
    others = ["policy.megatron_cfg.first_last_layers_bf16", "policy.dtensor_cfg.fsdp_param_dtype"]
    others += ["policy.megatron_cfg.te_precision_config_file", "policy.optimizer.kwargs.half_dtype"]
    remedies |= dict.fromkeys(others, "")
    words += [f"++{key}=true" for key in others]
    code, plan = planned("--parameters", "1B", "--", *DTENSOR, *read, *words)
    told = {one["key"]: one["remedy"] for one in plan["problems"]}
    leave = {key: f"eave {key} out." for key in remedies}
    expected = {
        key: f"Write {needs}, or l{leave[key]}" if needs else f"L{leave[key]}"
        for key, needs in remedies.items()
    }
    assert (code, told) == (1, expected)


@needs("nemo_rl")
def test_an_unread_key_that_says_what_is_in_force_is_a_note(
    monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    monkeypatch.chdir(model)
    (model / "job.yaml").write_text(NEMO_RL.format(model=model))
    keys = ["policy.dtensor_cfg.fsdp_output_dtype", "policy.optimizer.exp_avg_dtype"]
    words = [f"{key}=float32" for key in keys]
    line = ("--parameters", "1B", "--", *DTENSOR, "++grpo.advantage_dtype=bf16")
    code, plan = planned(*line, *(f"++{word}" for word in words))
    told = [f"{word}: nothing reads this key; fp32 is in force without it" for word in words]
    assert (code, sorted(plan["models"][0]["notes"][-2:])) == (0, sorted(told))
    assert "grpo.advantage_dtype=bf16: NeMo-RL reads no key of this name" in plan["notes"]


LORAS = [
    pytest.param(
        GRPO, "actor_rollout_ref.model.lora_rank", f"++{MIXED}.parm_dtype", marks=needs("verl")
    ),
    pytest.param(
        (*SKYRL, "trainer.strategy=fsdp2"),
        "trainer.policy.model.lora.rank",
        "trainer.policy.fsdp_config.mixed_precision.buffer_dtype",
        marks=needs("skyrl"),
    ),
    pytest.param(
        DTENSOR,
        "++policy.dtensor_cfg.lora_cfg.enabled",
        "++policy.precison",
        marks=needs("nemo_rl"),
    ),
]


@pytest.mark.filterwarnings("ignore:LoRA is enabled")  # by SkyRL 0.2
@pytest.mark.parametrize(("line", "lora", "wrong"), LORAS, ids=lambda one: "")
def test_a_job_that_cannot_be_planned_is_checked_all_the_same(
    monkeypatch: pytest.MonkeyPatch, model: Path, line: tuple[str, ...], lora: str, wrong: str
) -> None:
    monkeypatch.chdir(model)
    (model / "job.yaml").write_text(NEMO_RL.format(model=model))
    words = (f"{lora}={'true' if lora.endswith('enabled') else 8}", f"{wrong}=fp16")
    code, _, told = command("plan", "--model", model / "nowhere", "--", *line, *words)
    assert code == 2
    for text in (
        f"{lora.lstrip('+')}=",
        "LoRA adapters",
        "nowhere",
        f"{wrong.lstrip('+')}=fp16 has",
    ):
        assert text in told


@needs("verl")
def test_a_precision_at_a_key_that_verl_lacks_is_told() -> None:
    keys = ("exp_avg_dtype", "trainer.precision", "data.dtype", "actor_rollout_ref.param_dtype")
    known = (
        "++actor_rollout_ref.rollout.dtype=bfloat16",
        f"++{ACTOR}.fsdp_config.model_dtype=fp32",
    )
    _, plan = planned("--parameters", "1B", "--", *GRPO, *(f"+{key}=bf16" for key in keys), *known)
    told = [
        one.partition(":")[0] for one in plan["notes"] if "verl's config has no such key" in one
    ]
    assert told == [f"{key}=bf16" for key in keys]


@needs("skyrl")
@pytest.mark.parametrize("strategy", ["fsdp2", "megatron"])
def test_fp16_by_the_flag_that_skyrl_lacks(strategy: str) -> None:
    line = (*SKYRL, f"trainer.strategy={strategy}", "trainer.algorithm.use_kl_loss=false")
    said = " ".join(refused("--", *line, "trainer.fp16=true").split())
    written = said.partition("Did you mean ")[2].partition("?")[0].split(" and ")
    code, plan = planned("--parameters", "1M", "--", *line, *written)
    assert (code, plan["models"][0]["computes"]) == (0, "fp16")


@needs("skyrl")
def test_what_skyrl_alone_would_not_tell() -> None:
    section = "trainer.policy.fsdp_config.mixed_precision"
    line = ("--parameters", "1B", "--", *SKYRL)
    _, plan = planned(*line, "trainer.strategy=fsdp2", f"{section}.reduce_dtype=fp16")
    assert any(
        f"{section}.reduce_dtype=float16 is no fp16" in one for one in plan["models"][0]["notes"]
    )
    _, plan = planned(*line, "trainer.strategy=fsdp2", f"{section}.reduce_dtype=bf16")
    assert plan["models"][0]["notes"] == []
    layers = "trainer.policy.megatron_config.transformer_config_kwargs"
    code, plan = planned(*line, "trainer.strategy=megatron", f"{layers}.fp8_param=true")
    (problem,) = plan["problems"]
    found = (code, problem["code"], problem["key"])
    assert found == (1, "fp8-parameters", f"{layers}.fp8_param")
    said = refused(*line, "trainer.policy.fsdp_config.param_dtype=fp16")
    assert f"Did you mean {section}.param_dtype? " in said


def since(release: str) -> pytest.MarkDecorator:
    old = importlib.util.find_spec("verl") is None or Version(version("verl")) < Version(release)
    return pytest.mark.skipif(old, reason=f"verl has this from {release}")


@needs("verl")
def test_a_key_in_the_wrong_section_of_a_megatron_engine(model: Path) -> None:
    layers = f"{ACTOR}.megatron.override_transformer_config"
    remedies = {
        f"{layers}.grad_reduce_in_fp32": f"Write {ACTOR}.megatron.override_ddp_config.grad_",
        f"{layers}.main_grads_dtype": f"Write {OPTIM}.override_optimizer_config.main_grads_dtype",
        f"{layers}.moe_router_dtpye": "Did you mean moe_router_dtype?",
    }
    right = (f"{layers}.moe_router_dtype", f"{layers}.vocab_size")  # of Megatron-Bridge's models
    words = [f"++{key}=fp32" for key in (*remedies, *right)]
    if Version(version("verl")) >= Version("0.9"):
        words.append(f"++{ACTOR}.fsdp_config.mixed_precision.param_dtype=fp32")
        remedies[f"{ACTOR}.fsdp_config"] = f"Write {ACTOR}.megatron.dtype"
    line = (*GRPO_ON_MEGATRON, f"actor_rollout_ref.model.path={model}")
    code, plan = planned("--", *line, *words)
    told = {one["key"]: one["remedy"] for one in plan["problems"]}
    assert (code, told.keys()) == (1, remedies.keys())
    assert {one["code"] for one in plan["problems"]} == {"key"}
    for key, remedy in remedies.items():
        assert remedy in told[key]


@needs("verl")
@since("0.9")
def test_a_critics_section_has_its_own_name() -> None:
    key = "++critic.fsdp_config.mixed_precision.param_dtype=fp16"
    _, plan = planned("--parameters", "1B", "--", *VERL, "algorithm.adv_estimator=gae", key)
    (problem,) = (one for one in plan["problems"] if one["subject"] == "critic")
    assert problem["key"] == "critic.fsdp_config"
    assert problem["remedy"] == "Write critic.fsdp, or leave it out."


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
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    line: tuple[str, ...],
    half: list[str],
    without: str,
) -> None:
    monkeypatch.chdir(model)
    (model / "job.yaml").write_text(NEMO_RL.format(model=model))
    _, plan = planned("--parameters", "1B", "--", *line, *half)
    decided = next(
        one for one in plan["models"][0]["decisions"] if one["feature"] == "fp16-scaling"
    )
    scales = decided["because"].startswith("verl's own scaler")
    assert (without in decided["without"]) is not scales


@needs("verl")
@pytest.mark.parametrize(
    "words",
    [
        ("actor_rollout_ref.actor.use_kl_loss=True", "algorithm.adv_estimator=gae"),
        ("--config-name=ppo_megatron_trainer", "algorithm.adv_estimator=gae"),
        pytest.param(("model_engine=torchtitan",), marks=since("0.8")),
    ],
    ids=str,
)
def test_verls_own_defaults_are_not_written(words: tuple[str, ...]) -> None:
    names = [word for word in words if word.startswith("--")]
    line = [*VERL[:3], *names, *GRPO[3:], *(word for word in words if word not in names)]
    code, plan = planned("--parameters", "1B", "--", *line)
    assert (code, plan["problems"]) == (0, [])
    assert not [note for note in plan["notes"] if "without effect" in note]


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


@needs("verl")
def test_dtypes_of_models_that_verl_does_not_build() -> None:
    ref = "actor_rollout_ref.ref.fsdp_config.model_dtype=bf16"
    code, plan = planned("--parameters", "1B", "--", *GRPO, ref)
    (note,) = (one for one in plan["notes"] if "without effect" in one)
    assert (code, plan["problems"]) == (0, [])
    off = "algorithm.use_kl_in_reward and actor.use_kl_loss are off"
    assert note == f"ref: not built, as {off}; without effect: {ref}"
    _, built = planned("--parameters", "1B", "--", *GRPO, ref, f"{ACTOR}.use_kl_loss=true")
    assert not [one for one in built["notes"] if "without effect" in one]
    words = ("critic.megatron.dtype=float16", f"{OVERRIDE}.exp_avg_dtype=bf16")
    for more, why in (
        ((), "algorithm.adv_estimator=grpo"),
        (("critic.enable=false", "algorithm.adv_estimator=gae"), "critic.enable=false"),
    ):
        line = (*GRPO_ON_MEGATRON, words[0], f"++{words[1]}", *more)
        _, plan = planned("--parameters", "1B", "--", *line)
        (note,) = (one for one in plan["notes"] if "without effect" in one)
        assert note == f"critic: not built, as {why}; without effect: {', '.join(words)}"


LAYERS = "trainer.policy.megatron_config.transformer_config_kwargs"


@pytest.mark.parametrize(
    ("line", "key"),
    [
        pytest.param(
            GRPO_ON_MEGATRON,
            f"{ACTOR}.megatron.override_transformer_config.params_dtype",
            marks=needs("verl"),
        ),
        pytest.param(
            (*SKYRL, "trainer.strategy=megatron"),
            f"{LAYERS}.moe_router_dtype",
            marks=needs("skyrl"),
        ),
        pytest.param(
            ("python3", "nemo_rl/run_grpo.py", "--config", "job.yaml"),
            "policy.megatron_cfg.moe_router_dtype",
            marks=needs("nemo_rl"),
        ),
    ],
)
def test_a_dtype_name_that_megatrons_layers_do_not_take(
    monkeypatch: pytest.MonkeyPatch, model: Path, line: tuple[str, ...], key: str
) -> None:
    monkeypatch.chdir(model)
    (model / "job.yaml").write_text(NEMO_RL.format(model=model))
    words = ("--parameters", "1B", "--", *line)
    prefix = "" if key.startswith(LAYERS) else "++"
    code, plan = planned(*words, f"{prefix}{key}=bf17")
    (problem,) = plan["problems"]
    assert (code, problem["code"], problem["key"]) == (1, "dtype", key)
    assert f"{key}='bf17' is not a dtype" in problem["message"]
    assert planned(*words, f"{prefix}{key}=FP32")[1]["problems"] == []
    monkeypatch.setenv("PRECISION_SHIM_FEATURES", "-dtype-coercion")  # the worker does not look
    assert planned(*words, f"{prefix}{key}=bf17")[1]["problems"] == []


@needs("verl")
def test_one_mistake_is_one_problem_of_verls_megatron_engine(model: Path) -> None:
    line = (*GRPO_ON_MEGATRON, f"actor_rollout_ref.model.path={model}")
    key = f"{ACTOR}.megatron.override_transformer_config.fp16"
    code, plan = planned("--", *line, f"+{key}=true")
    (problem,) = plan["problems"]
    assert (code, problem["code"], problem["key"]) == (1, "flags", key)
    (unread,) = planned("--", *line, f"{OPTIM}.betas=[0.9,0.95]")[1]["models"][0]["notes"]
    assert f"{OPTIM}.betas=[0.9, 0.95]: verl does not pass it" in unread
    assert f"{ACTOR}.megatron.dtype=float16" in problem["remedy"]
    override = f"{OPTIM}.override_optimizer_config"
    key, off = f"{override}.exp_avg_dtype", f"+{override}.use_precision_aware_optimizer=false"
    code, plan = planned("--", *line, f"+{key}=bf16", off)
    assert (code, [one["key"] for one in plan["problems"]]) == (1, [key])


@needs("skyrl")
@pytest.mark.parametrize("strategy", ["fsdp2", "megatron"])
def test_skyrls_dtypes_of_a_model_that_the_job_does_not_build_are_noted(strategy: str) -> None:
    base = (*SKYRL, f"trainer.strategy={strategy}", "trainer.algorithm.use_kl_loss=false")
    half = "fsdp_config.mixed_precision.param_dtype"
    words = (
        f"trainer.critic.{half}=fp16",
        f"trainer.ref.{half}=bf16",  # the default
        "trainer.ref.megatron_config.optimizer_config_kwargs.exp_avg_dtype=bf16",
        "trainer.ref.megatron_config.transformer_config_kwargs.params_dtype=bf16",
    )
    code, plan = planned("--parameters", "1B", "--", *base, *words)
    notes = [one for one in plan["notes"] if "not built" in one]
    assert (code, subjects(plan), len(notes)) == (0, ["policy"], 2)
    assert ("use_kl_loss" in notes[0], "model.path is null" in notes[1]) == (True, True)
    told = " ".join(notes)
    assert [word in told for word in words] == [True, False, True, True]
    _, plain = planned("--parameters", "1B", "--", *base)
    assert not [one for one in plain["notes"] if "not built" in one]


@needs("nemo_rl")
def test_nemo_rls_dtypes_of_a_model_that_the_job_does_not_build_are_noted(model: Path) -> None:
    (model / "job.yaml").write_text(NEMO_RL.format(model=model))
    words = ("python3", "examples/nemo_rl/run_grpo.py", "--config", str(model / "job.yaml"))
    code, plan = planned("--parameters", "1B", "--", *words, "++value.precision=float16")
    (note,) = [one for one in plan["notes"] if "not built" in one]
    assert (code, subjects(plan)) == (0, ["policy"])
    assert note.startswith(
        "value: not built, as value.model_name is not set; without effect: value."
    )
    _, plain = planned("--parameters", "1B", "--", *words)
    assert not [one for one in plain["notes"] if "not built" in one]


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
    (part,) = planned(*words)[1]["models"][0]["after"][0]["parts"]
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
        (part,) = one["after"][0]["parts"]
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
    (part,) = plan["models"][0]["after"][0]["parts"]
    assert part["data_parallel_size"] == 8
    assert part["components"]["exp_avg"]["dtypes"] == ["fp32"]
    words += ("--config", "qwen3_debugmodel", "--optimizer.implementation=fused_opt_states_bf16")
    (low,) = planned("--", *words)[1]["models"][0]["after"][0]["parts"]
    for name in ("exp_avg", "exp_avg_sq"):
        assert low["components"][name]["dtypes"] == ["bf16"]
        assert 2 * low["components"][name]["bytes"] == part["components"][name]["bytes"]
    refused("--", *words, "--config", "nonsense")


LLAMA = ("-m", "torchtitan.train", "--module", "llama3", "--config", "llama3_debugmodel")
"""The config has 16 attention heads, and 16 heads for keys and values."""


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
    assert plan["models"][0]["after"] == plan["models"][0]["before"]
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
@pytest.mark.parametrize("word", ["training.dtype=half", "training.mixed_precision_param=bf17"])
def test_a_dtype_that_torchtitan_does_not_train_in(word: str) -> None:
    code, plan = planned("--", "torchrun", "--nproc-per-node=8", *LLAMA, f"--{word}")
    (problem,) = plan["problems"]
    assert (code, problem["code"], problem["key"]) == (1, "dtype", word.partition("=")[0])
    assert problem["remedy"]


@needs("torchtitan")
@pytest.mark.parametrize(
    ("gpus", "degree", "fault"),
    [
        (8, "data_parallel_shard_degree=4", "the degrees multiply to 4 GPUs, and the job has 8"),
        (8, "tensor_parallel_degree=0", "it is less than 1"),
        (6, "tensor_parallel_degree=3", "it does not divide 16 n_heads"),
        (8, "expert_parallel_degree=3", "it does not divide 8 GPUs of a replica"),
    ],
)
def test_degrees_that_do_not_divide(gpus: int, degree: str, fault: str) -> None:
    word = f"parallelism.{degree}"
    said = refused("--", "torchrun", f"--nproc-per-node={gpus}", *LLAMA, f"--{word}")
    assert f"{word}: the job's layout cannot be computed: {fault}" in said


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
def test_torchtitans_adapters_are_refused() -> None:
    from torchtitan.components.lora import LoRAConverter
    from torchtitan.models.llama3 import model_registry

    from precision_shim_tools.plan.torchtitan import built

    adapters = LoRAConverter.Config(rank=8, alpha=16.0, target_modules=["wq", "wo"])
    spec = model_registry("debugmodel", converters=[adapters])
    with pytest.raises(PlanError, match="LoRA adapters, which are not planned"):
        built(spec)


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
