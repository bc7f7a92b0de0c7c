"""Dtypes of actor, reference model and rollout in verl's jobs: messages and engines."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

import precision_shim
from precision_shim.errors import DtypeError, PrecisionShimWarning, UnsupportedPrecisionError

from ..every_framework import both_sides as both
from ..processes.commands import python
from ..processes.rank_server import Ranks
from ..processes.ray_cluster import drive
from ..stand_ins.planted_engines import plant_choices
from .conftest import VERL

pytestmark = pytest.mark.skipif(Version("0.7") > VERL, reason="the shim refuses verl 0.6")

ROLLOUT = "actor_rollout_ref.rollout"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
LINE = ("python3", "-m", "verl.trainer.main_ppo")
LEGACY = Version("0.8") > VERL
"""Whether the default workers are 0.7.1's, which read the compute dtype from another key."""


def side(role: str, dtype: str) -> list[str]:
    """The overrides that make a role on FSDP compute in a dtype."""
    place = f"actor_rollout_ref.{role}.fsdp_config"
    mixed = f"+{place}.mixed_precision.param_dtype={dtype}"
    return [f"{place}.dtype={both.DTYPES[dtype]}"] if LEGACY else [mixed]


def key_of(role: str) -> str:
    place = f"actor_rollout_ref.{role}.fsdp_config"
    return f"{place}.dtype" if LEGACY else f"{place}.mixed_precision.param_dtype"


@cache
def _compose(place: str, name: str, words: tuple[str, ...]) -> Any:
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(place, version_base=None):
        return compose(name, overrides=list(words), return_hydra_config=True)


@contextmanager
def composed(words: Sequence[str], directory: Path | None = None, name: str = "") -> Iterator[Any]:
    """The config of verl's entry point; within the block Hydra's own config is set."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import open_dict
    from verl.trainer import config as shipped

    place = str(directory or os.path.dirname(shipped.__file__))
    config = copy.deepcopy(_compose(place, name or "ppo_trainer", tuple(words)))
    HydraConfig.instance().set_config(config)
    try:
        with open_dict(config):
            del config["hydra"]
        yield config
    finally:
        HydraConfig.instance().cfg = None


@dataclass(frozen=True)
class Started:
    """A driver's warnings, and the dtypes that its engines will have."""

    told: tuple[str, ...]
    chosen: dict[str, str]
    rollout: str
    config: Any


class Verl(both.Sides):
    """What verl's ``main`` does with a config before Ray starts."""

    framework, key, written = "verl", f"{ROLLOUT}.dtype", "bf16"

    def __init__(self, strategy: str = "fsdp") -> None:
        self.megatron = strategy == "megatron"

    def job(self, trainer: str, rollout: str, *more: str) -> Any:
        """The overrides, the folder of the configs, and the config's name."""
        megatron = f"actor_rollout_ref.actor.megatron.dtype={both.DTYPES[trainer]}"
        words = [f"{self.key}={rollout}", f"{ROLLOUT}.name=vllm", *more]
        words += [megatron] if self.megatron else side("actor", trainer)
        return words, None, "ppo_megatron_trainer" if self.megatron else "ppo_trainer"

    def run(self, job: Any) -> tuple[Any, str]:
        from verl.utils.config import omega_conf_to_dataclass
        from verl.utils.device import auto_set_device  # imported after install(): the wrapper

        with composed(*job) as config:
            auto_set_device(config)
            made = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
        return config, made.dtype

    def handed(self, made: tuple[Any, str]) -> str:
        return made[1]

    def line(self, job: Any) -> list[str]:
        words, _, name = job
        return [*LINE, f"--config-name={name}", *words]


def start(
    words: Sequence[str], directory: Path | None = None, name: str = "", **on: Any
) -> Started:
    """Install the shim, and run what verl's ``main`` does with a config before Ray starts."""
    precision_shim.install(frameworks=["verl"], **on)
    engine = [] if any("rollout.name" in one for one in words) else [f"{ROLLOUT}.name=vllm"]
    found = Verl().start(([*engine, *words], directory, name))
    config, rollout = found.made
    return Started(tuple(found.told), found.chosen, rollout, config)


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    yield
    precision_shim.uninstall()


class TestBothSides(both.BothSides, both.Names, both.Planned):
    @pytest.fixture
    def sides(self) -> Verl:
        return Verl()


def test_the_actors_dtype_on_megatron(shim: Any) -> None:
    sides = Verl("megatron")
    job = sides.job(*both.LOST)
    planned = both.of_plan(sides.line(job))
    shim(frameworks="verl", export=False)
    found = sides.start(job)
    assert found.chosen == {"rollout": sides.beside(*both.LOST)}
    assert planned == (found.told, found.notes)
    assert len(found.told) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("actor", "written"), [("fp16", None), ("fp16", "fp32"), ("bf16", "bf16")])
def test_follow_replaces_what_stands_there(actor: str, written: str | None) -> None:
    from omegaconf import OmegaConf

    words = [*side("actor", actor), "actor_rollout_ref.actor.use_kl_loss=true"]
    if written:
        words += [f"{ROLLOUT}.dtype={written}", *side("ref", written)]
    made = start(words, settings={"rollout": "follow"}, strict=True)
    assert (made.rollout, made.told) == (both.DTYPES[actor], ())
    keys = made.chosen.pop("dtype keys", "")
    assert made.chosen == dict.fromkeys(("ref", "rollout"), f"{actor}, as the actor")
    before = written or "bf16"
    assert bool(keys) is (actor != before)
    if keys:
        assert OmegaConf.select(made.config, key_of("ref")) == both.DTYPES[actor]
        ref, rollout = keys.split("; ")
        assert ref.startswith(f"{key_of('ref')}: ")
        assert ref.endswith(f" -> {both.DTYPES[actor]}")
        assert rollout == f"{ROLLOUT}.dtype: {both.DTYPES[before]} -> {both.DTYPES[actor]}"


def test_follow_replaces_the_key_that_goes_over_the_rollouts() -> None:
    over = f"{VLLM}.dtype"
    made = start([*side("actor", "fp16"), f"+{over}=bf16"], settings={"rollout": "follow"})
    assert made.told == ()
    assert made.chosen["dtype keys"] == f"{over}: bfloat16 -> float16"
    assert made.config.actor_rollout_ref.rollout.engine_kwargs.vllm.dtype == "float16"


def test_the_reference_model_is_told_of_with_its_own_key() -> None:
    words = [*side("actor", "fp16"), f"{ROLLOUT}.dtype=half"]
    kl = "actor_rollout_ref.actor.use_kl_loss=true"
    assert start(words).told == ()
    precision_shim.uninstall()
    (told,) = start([*words, kl]).told
    line = told.partition("Write ")[2].partition(",")[0]
    assert line.lstrip("+") == f"{key_of('ref')}=float16"
    precision_shim.uninstall()
    assert start([*words, kl, line]).told == ()
    precision_shim.uninstall()
    # With LoRA, the actor without its adapters serves as the reference model.
    assert start([*words, kl, "actor_rollout_ref.model.lora_rank=8"]).told == ()


def test_a_wrong_name_in_engine_kwargs_ends_the_driver() -> None:
    key = f"{VLLM}.dtype"
    with pytest.raises(DtypeError, match=rf"{key}='flaot16'"):
        start([f"+{key}=flaot16"])


def test_engine_kwargs_go_over_the_key() -> None:
    over = f"+{ROLLOUT}.engine_kwargs.vllm.dtype=half"
    words = [*side("actor", "fp16"), over]
    made = start(words)
    assert made.told == ()
    assert made.chosen == {"rollout": "fp16, as the actor"}
    from verl.utils.config import omega_conf_to_dataclass

    assert omega_conf_to_dataclass(made.config.actor_rollout_ref.rollout).engine_kwargs["vllm"] == {
        **dict(made.config.actor_rollout_ref.rollout.engine_kwargs.vllm),
        "dtype": "float16",
    }


@pytest.mark.slow
def test_quantised_and_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_choices(tmp_path / "engines", monkeypatch)
    words = side("actor", "fp16")
    made = start([*words, f"{ROLLOUT}.quantization=fp8"])
    assert made.chosen == {"rollout": "fp8 beside the actor's fp16"}
    precision_shim.uninstall()
    # Under torchao the rollout's dtype (bf16) counts, so the shim warns.
    made = start([*words, f"{ROLLOUT}.quantization=torchao"])
    assert len(made.told) == 1
    precision_shim.uninstall()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma2"}))
    words.append(f"actor_rollout_ref.model.path={tmp_path}")
    for setting, name in (("tell", "half"), ("follow", "half"), ("follow", "bf16")):
        made = start([*words, f"{ROLLOUT}.dtype={name}"], settings={"rollout": setting})
        (told,) = made.told
        assert ("refuses to run gemma2 in fp16" in told) is (name == "half")
        assert "Train in bf16" in told
        assert made.rollout == ("float16" if name == "half" else "bfloat16")
        precision_shim.uninstall()
    sglang = [f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.dtype=half"]
    assert start([*words, *sglang]).told == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "rounded"),
    [
        ([f"+{VLLM}.quantization=awq"], "awq weights"),
        (
            [f"+{VLLM}.kv_cache_dtype=fp8_e4m3", f"{ROLLOUT}.quantization=torchao"],
            "fp8_e4m3 KV cache and torchao weights",
        ),
        ([f"+{VLLM}.kv_cache_dtype=bfloat16"], ""),
        (
            [f"{ROLLOUT}.name=sglang", f"+{ROLLOUT}.engine_kwargs.sglang.torchao_config=fp8wo"],
            "fp8wo weights",
        ),
    ],
)
def test_what_the_engine_keeps_in_fewer_bits(words: list[str], rounded: str) -> None:
    made = start([*side("actor", "bf16"), *words])
    with_it = f"bf16 with {rounded} beside the actor's bf16"
    assert made.chosen == {"rollout": with_it if rounded else "bf16, as the actor"}
    assert made.told == ()


def test_verls_own_defaults_have_no_unknown_key() -> None:
    assert both.plan_of([*LINE, f"{ROLLOUT}.name=vllm"])["problems"] == []


def test_a_rollout_without_a_dtype_lets_the_engine_choose() -> None:
    made = start([*side("actor", "fp16"), f"{ROLLOUT}.dtype=null"])
    assert made.rollout is None
    assert made.chosen == {"rollout": "the checkpoint's dtype beside the actor's fp16"}
    assert made.told == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpoint", "backend", "model_type", "computes"),
    [("float32", "sglang", "qwen2", "fp16"), ("float16", "vllm", "gemma2", "bf16")],
)
def test_auto_is_what_the_engine_makes_of_the_checkpoint(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    checkpoint: str,
    backend: str,
    model_type: str,
    computes: str,
) -> None:
    plant_choices(tmp_path / "engines", monkeypatch)
    files = {"model_type": model_type, "torch_dtype": checkpoint}
    (tmp_path / "config.json").write_text(json.dumps(files))
    place = f"actor_rollout_ref.model.path={tmp_path}"
    words = [*side("actor", "fp16"), place, f"{ROLLOUT}.name={backend}", f"{ROLLOUT}.dtype=auto"]
    made = start(words)
    assert made.rollout == "auto"
    agrees = computes == "fp16"
    assert made.chosen == {"rollout": Verl().beside("fp16", computes)}
    assert len(made.told) == (0 if agrees else 1)


@pytest.mark.skipif(LEGACY, reason="distillation is from 0.8")
def test_each_of_two_teachers_has_its_line() -> None:
    place = "distillation.teacher_models"
    inference = "{{_target_:verl.workers.config.RolloutConfig,name:vllm,dtype:{}}}"
    words = [
        *side("actor", "fp16"),
        "distillation.enabled=true",
        f"{ROLLOUT}.dtype=half",
        *(
            f"+{place}.{name}={{key:{name},inference:{inference.format(dtype)}}}"
            for name, dtype in (("first", "float16"), ("second", "bf16"))
        ),
    ]
    made = start(words)
    assert made.chosen == {
        "rollout": "fp16, as the actor",
        "teacher first": "fp16, as the actor",
        "teacher second": Verl().beside("fp16", "bf16"),
    }
    (told,) = made.told
    assert f"{place}.second.inference.dtype=float16" in told


def test_follow_writes_into_a_config_that_is_read_only() -> None:
    from omegaconf import OmegaConf

    words, follow = side("actor", "fp16"), {"rollout": "follow"}
    precision_shim.install(frameworks=["verl"], settings=follow)
    from verl.utils.device import auto_set_device

    with composed([*words, f"{ROLLOUT}.name=vllm"]) as config:
        config.trainer.device = "cpu"
        OmegaConf.set_readonly(config.actor_rollout_ref, True)
        auto_set_device(config)
        assert OmegaConf.is_readonly(config.actor_rollout_ref)
    assert config.actor_rollout_ref.rollout.dtype == "float16"


@pytest.mark.skipif(not LEGACY, reason="from 0.8 the reference model has a dtype of its own")
def test_the_legacy_reference_model_on_megatron_has_the_actors_dtype() -> None:
    words = ["actor_rollout_ref.actor.megatron.dtype=float16", f"{ROLLOUT}.dtype=float16"]
    words.append("actor_rollout_ref.actor.use_kl_loss=true")
    made = start(words, name="ppo_megatron_trainer", strict=True)
    assert made.chosen == {"ref": "fp16, as the actor", "rollout": "fp16, as the actor"}


def test_an_engine_that_the_shim_does_not_know() -> None:
    made = start(["actor_rollout_ref.actor.strategy=another"])
    assert made.chosen == {"rollout": "not compared with the actor"}


@pytest.mark.skipif(
    Version("0.9.1") > VERL, reason="before 0.9.1 the shim scales none of the three"
)
@pytest.mark.parametrize(
    ("strategy", "key"),
    [
        ("veomni", "veomni.dtype"),
        ("torchtitan", "torchtitan.dtype"),
        ("fsdp_turbo", "fsdp_config.turbo_config.distributed.fsdp_plan.param_dtype"),
    ],
)
@pytest.mark.parametrize("follow", [False, True])
def test_other_engines_are_compared_in_driver_and_plan(
    strategy: str, key: str, follow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = [] if strategy == "fsdp_turbo" else [f"model_engine={strategy}"]
    words = [*model, f"++actor_rollout_ref.actor.{key}=float16", f"{ROLLOUT}.dtype=bfloat16"]
    words += ["actor_rollout_ref.actor.use_kl_loss=true", f"{ROLLOUT}.name=vllm"]
    words += [f"actor_rollout_ref.{role}.strategy={strategy}" for role in ("actor", "ref")]
    monkeypatch.setenv("PRECISION_SHIM_ROLLOUT", "follow" if follow else "tell")
    precision_shim.install(frameworks=["verl"], export=False)
    made = Verl().start((words, None, "ppo_trainer"))
    chosen = "fp16, as the actor" if follow else "bf16 beside the actor's fp16"
    assert (made.chosen["ref"], made.chosen["rollout"]) == (chosen, chosen)
    told = [one for one in made.told if "computes in fp16" in one]
    assert len(told) == (0 if follow else 2)
    assert f"actor_rollout_ref.ref.{key}=float16, or" in "".join(told) or follow
    precision_shim.uninstall()
    assert both.of_plan(Verl().line((words, None, "ppo_trainer"))) == (told, made.notes)


def test_programs_that_were_imported_before() -> None:
    import verl.trainer.main_ppo as program

    precision_shim.install(frameworks=["verl"])
    words = [*side("actor", "fp16"), f"{ROLLOUT}.name=vllm"]
    told = pytest.warns(PrecisionShimWarning, match="the actor computes in fp16")
    with composed(words) as config, told:
        program.auto_set_device(config)


@pytest.mark.skipif(Version("0.9.1") > VERL, reason="verl's receiver in vLLM came with 0.9.1")
def test_delta_takes_no_fp16_and_the_driver_says_so() -> None:
    words = [*side("actor", "fp16"), f"{ROLLOUT}.dtype=float16", f"{ROLLOUT}.name=vllm"]
    words.append(f"{ROLLOUT}.checkpoint_engine.backend=delta_sharded")
    with pytest.raises(UnsupportedPrecisionError, match="delta_sharded"):
        start(words)
    ((problem,), _) = both.of_plan(["PRECISION_SHIM=1", *LINE, *words])
    assert "delta_sharded" in problem


def test_a_job_without_a_rollout() -> None:
    from omegaconf import OmegaConf

    precision_shim.install(frameworks=["verl"])
    from verl.utils.device import auto_set_device

    auto_set_device(OmegaConf.create({"engine": {"strategy": "fsdp"}, "optim": {}}))
    assert not precision_shim.status().decisions


# -- the plan --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_plan_says_the_same_of_the_reference_model() -> None:
    kl = "actor_rollout_ref.actor.use_kl_loss=true"
    words = [*side("actor", "fp16"), kl, f"{ROLLOUT}.dtype=bf16", f"{ROLLOUT}.name=vllm"]
    problems, notes = both.of_plan([*LINE, *words])
    made = start(words)
    assert problems == list(made.told)
    assert len(made.told) == 2
    for subject, chosen in made.chosen.items():
        assert any(one.startswith(f"{subject}: rollout-agreement: {chosen} (") for one in notes)


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["PATH", "SET_IN_THE_JOB_ALONE"])
def test_the_plan_names_a_key_that_it_cannot_resolve(variable: str) -> None:
    key = "trainer.project_name"
    notes = both.plan_of([*LINE, f"{key}='${{oc.env:{variable}}}'"])["notes"]
    found = [one for one in notes if one.startswith("not resolved on this machine")]
    assert [key in one for one in found] == [True] * (variable != "PATH")


# -- verl's own entry point ------------------------------------------------------------------------


@pytest.mark.slow
def test_strict_ends_the_driver_before_ray_starts(tmp_path: Path) -> None:
    words = [*side("actor", "fp16"), f"hydra.run.dir={tmp_path}"]
    cpu = {"CUDA_VISIBLE_DEVICES": "", "PRECISION_SHIM": "strict"}
    ended = python("-m", "verl.trainer.main_ppo", *words, timeout=240, **cpu)
    assert ended.returncode == 1
    assert f"Write {ROLLOUT}.dtype=float16" in ended.stderr
    assert "Started a local Ray instance" not in ended.stderr + ended.stdout


@pytest.mark.slow
@pytest.mark.oldest
@pytest.mark.usefixtures("start_up_file")
@pytest.mark.timeout(400)
def test_a_ray_actor_gets_what_the_driver_wrote(ray_drivers: Ranks, tmp_path: Path) -> None:
    """With verl's ``run_ppo``; the shim is in the actor's process."""
    script = Path(__file__).with_name("sides_driver.py")
    found = drive(ray_drivers, script, tmp_path, timeout=380, PRECISION_SHIM="1")
    assert found == {"rollout": "float16", "named": ["wrapped"], "told": []}
