"""Dtypes of actor, reference model and rollout in verl's jobs: messages and engines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

import precision_shim
from precision_shim.errors import DtypeError, PrecisionShimWarning, UnsupportedPrecisionError

from ..every_framework import both_sides as both
from ..processes.composed_once import composed_once
from ..processes.rank_server import Ranks, run_module
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


@contextmanager
def composed(words: Sequence[str], directory: Path | None = None, name: str = "") -> Iterator[Any]:
    """The config of verl's entry point; within the block Hydra's own config is set."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import open_dict
    from verl.trainer import config as shipped

    place = str(directory or os.path.dirname(shipped.__file__))
    with hydra.initialize_config_dir(place, version_base=None), composed_once():
        config = hydra.compose(name or "ppo_trainer", list(words), return_hydra_config=True)
    HydraConfig.instance().set_config(config)
    try:
        with open_dict(config):
            del config["hydra"]
        yield config
    finally:
        HydraConfig.instance().cfg = None


class Verl(both.Sides):
    """What verl's ``main`` does with a config before Ray starts."""

    framework, key, written = "verl", f"{ROLLOUT}.dtype", "bf16"

    def __init__(self, strategy: str = "fsdp", folder: Path | None = None) -> None:
        self.megatron, self.folder = strategy == "megatron", folder

    def job(self, trainer: str, rollout: str, *more: str, **model: str) -> Any:
        """The overrides, the folder of the configs, and its name; ``model`` is a config.json."""
        megatron = f"actor_rollout_ref.actor.megatron.dtype={both.DTYPES[trainer]}"
        words = [f"{ROLLOUT}.name=vllm", *([f"{self.key}={rollout}"] if rollout else []), *more]
        words += [megatron] if self.megatron else side("actor", trainer)
        if model and self.folder:
            (self.folder / "config.json").write_text(json.dumps(model))
            words.append(f"actor_rollout_ref.model.path={self.folder}")
        return words, None, "ppo_megatron_trainer" if self.megatron else "ppo_trainer"

    def run(self, job: Any) -> Any:
        from verl.utils.device import auto_set_device  # imported after install(): the wrapper

        with composed(*job) as config:
            auto_set_device(config)
        return config

    def handed(self, made: Any) -> str:
        """The dtype of the engine, which ``engine_kwargs`` override."""
        from verl.utils.config import omega_conf_to_dataclass

        rollout: Any = omega_conf_to_dataclass(made.actor_rollout_ref.rollout)
        own = (rollout.engine_kwargs or {}).get(rollout.name) or {}
        dtype: str = own.get("dtype") or rollout.dtype
        return dtype

    def line(self, job: Any) -> list[str]:
        words, _, name = job
        return [*LINE, f"--config-name={name}", *words]


def start(
    words: Sequence[str], directory: Path | None = None, name: str = "", **on: Any
) -> both.Started:
    """Install the shim, and run what verl's ``main`` does with a config before Ray starts."""
    precision_shim.install(frameworks=["verl"], **on)
    engine = [] if any("rollout.name" in one for one in words) else [f"{ROLLOUT}.name=vllm"]
    return Verl().start(([*engine, *words], directory, name))


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


def test_a_wrong_name_in_engine_kwargs_ends_the_driver() -> None:
    key = f"{VLLM}.dtype"
    with pytest.raises(DtypeError, match=rf"{key}='flaot16'"):
        start([f"+{key}=flaot16"])


AGREED, LOST = "fp16, as the actor", "bf16 beside the actor's fp16"
OVER, SGLANG = f"{VLLM}.dtype", f"{ROLLOUT}.name=sglang"
QUANTIZED = f"{ROLLOUT}.quantization"
AGREE, KL = {"ref": AGREED, "rollout": AGREED}, "actor_rollout_ref.actor.use_kl_loss=true"
REF = key_of("ref")
GEMMA = {"model_type": "gemma2"}
REFUSED, TOLD = ("refuses to run gemma2 in fp16",), ("the rollout in bf16",)


def rounded(what: str, actor: str = "bf16") -> str:
    return f"bf16 with {what} beside the actor's {actor}"


def teacher(name: str, dtype: str) -> str:
    inference = f"{{_target_:verl.workers.config.RolloutConfig,name:vllm,dtype:{dtype}}}"
    return f"+distillation.teacher_models.{name}={{key:{name},inference:{inference}}}"


@both.each(
    engine_kwargs=both.Row(f"fp16 - +{OVER}=half", AGREED),
    follow=both.Row(f"fp16 - +{OVER}=bf16", AGREED, follow=f"{OVER}: bfloat16 -> float16"),
    slow_fp8=both.Row(f"fp16 - {QUANTIZED}=fp8", "fp8 beside the actor's fp16", handed="bfloat16"),
    # Under torchao the rollout's dtype counts.
    slow_torchao=both.Row(f"fp16 - {QUANTIZED}=torchao", rounded("torchao weights", "fp16"), TOLD),
    slow_awq=both.Row(f"bf16 - +{VLLM}.quantization=awq", rounded("awq weights")),
    slow_fp8_cache=both.Row(
        f"bf16 - +{VLLM}.kv_cache_dtype=fp8_e4m3 {QUANTIZED}=torchao",
        rounded("fp8_e4m3 KV cache and torchao weights"),
    ),
    slow_bf16_cache=both.Row(f"bf16 - +{VLLM}.kv_cache_dtype=bfloat16", "bf16, as the actor"),
    slow_fp8wo=both.Row(
        f"bf16 - {SGLANG} +{ROLLOUT}.engine_kwargs.sglang.torchao_config=fp8wo",
        rounded("fp8wo weights"),
    ),
    slow_refused=both.Row("fp16 half", "fp16", REFUSED, model=GEMMA),
    slow_refused_and_follow=both.Row("fp16 half", "fp16", REFUSED, follow="", model=GEMMA),
    slow_not_made_to_follow=both.Row("fp16 bf16", LOST, ("Train in bf16",), follow="", model=GEMMA),
    slow_not_refused_by_sglang=both.Row(f"fp16 half {SGLANG}", AGREED, model=GEMMA),
    slow_auto_of_sglang=both.Row(
        f"fp16 auto {SGLANG}",
        AGREED,
        handed="auto",
        model={"model_type": "qwen2", "torch_dtype": "float32"},
    ),
    slow_auto_of_vllm=both.Row(
        "fp16 auto", LOST, TOLD, "auto", model={**GEMMA, "torch_dtype": "float16"}
    ),
    null=both.Row("fp16 null", "the checkpoint's dtype beside the actor's fp16", handed="None"),
    # With LoRA, the actor without its adapters serves as the reference model.
    lora=both.Row(f"fp16 half {KL} actor_rollout_ref.model.lora_rank=8", AGREED),
    unknown_engine=both.Row(
        "bf16 - actor_rollout_ref.actor.strategy=another",
        "not compared with the actor",
        handed="bfloat16",
    ),
)
class TestRows(both.Rows):
    @pytest.fixture
    def sides(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Verl:
        plant_choices(tmp_path / "engines", monkeypatch)
        return Verl(folder=tmp_path)


@both.each(
    lost=both.Row(f"fp16 half {KL}", {"ref": LOST, "rollout": AGREED}, (f"{REF}=float16",)),
    written=both.Row(f"fp16 half {KL} {' '.join(side('ref', 'fp16'))}", AGREE),
    slow_both_lost=both.Row(f"fp16 bf16 {KL}", {"ref": LOST, "rollout": LOST}, (REF, "rollout")),
    slow_follow=both.Row(
        f"fp16 - {KL}",
        AGREE,
        follow=f"{REF}: {'bfloat16' if LEGACY else 'not set'} -> float16; "
        f"{ROLLOUT}.dtype: bfloat16 -> float16",
    ),
    slow_follow_in_what_stands_there=both.Row(
        f"fp16 fp32 {KL} {' '.join(side('ref', 'fp32'))}",
        AGREE,
        follow=f"{REF}: {'float32' if LEGACY else 'fp32'} -> float16; "
        f"{ROLLOUT}.dtype: float32 -> float16",
    ),
)
class TestTheReferenceModel(both.Rows):
    planned = True

    @pytest.fixture
    def sides(self) -> Verl:
        return Verl()


@pytest.mark.skipif(LEGACY, reason="distillation is from 0.8")
@both.each(
    teachers=both.Row(
        f"fp16 half distillation.enabled=true {teacher('first', 'float16')} "
        f"{teacher('second', 'bf16')}",
        {"rollout": AGREED, "teacher first": AGREED, "teacher second": LOST},
        ("distillation.teacher_models.second.inference.dtype=float16",),
    )
)
class TestTeachers(both.Rows):
    @pytest.fixture
    def sides(self) -> Verl:
        return Verl()


@pytest.mark.skipif(not LEGACY, reason="from 0.8 the reference model has a dtype of its own")
@both.each(reference=both.Row(f"fp16 half {KL}", AGREE))
class TestLegacyReference(both.Rows):
    """It has the actor's dtype on Megatron."""

    @pytest.fixture
    def sides(self) -> Verl:
        return Verl("megatron")


def test_verls_own_defaults_have_no_unknown_key() -> None:
    assert both.plan_of([*LINE, f"{ROLLOUT}.name=vllm"])["problems"] == []


def test_follow_writes_into_a_config_that_is_read_only() -> None:
    from omegaconf import OmegaConf

    words, follow = side("actor", "fp16"), {"rollout": "follow"}
    precision_shim.install(frameworks=["verl"], settings=follow)
    from verl.utils.device import auto_set_device

    with composed([*words, f"{ROLLOUT}.name=vllm", KL]) as config:
        config.trainer.device = "cpu"
        OmegaConf.set_readonly(config.actor_rollout_ref, True)
        auto_set_device(config)
        assert OmegaConf.is_readonly(config.actor_rollout_ref)
    keys = (f"{ROLLOUT}.dtype", REF)
    assert [OmegaConf.select(config, key) for key in keys] == ["float16"] * 2


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
@pytest.mark.parametrize("variable", ["PATH", "SET_IN_THE_JOB_ALONE"])
def test_the_plan_names_a_key_that_it_cannot_resolve(variable: str) -> None:
    key = "trainer.project_name"
    notes = both.plan_of([*LINE, f"{key}='${{oc.env:{variable}}}'"])["notes"]
    found = [one for one in notes if one.startswith("not resolved on this machine")]
    assert [key in one for one in found] == [True] * (variable != "PATH")


# -- verl's own entry point ------------------------------------------------------------------------


@pytest.mark.slow
def test_strict_ends_the_driver_before_ray_starts(ray_drivers: Ranks, tmp_path: Path) -> None:
    words = ["verl.trainer.main_ppo", *side("actor", "fp16"), f"hydra.run.dir={tmp_path}"]
    cpu = {"CUDA_VISIBLE_DEVICES": "", "PRECISION_SHIM": "strict"}
    code, said = run_module(ray_drivers, *words, **cpu)
    assert code == 1
    assert f"Write {ROLLOUT}.dtype=float16" in said
    assert "Started a local Ray instance" not in said
