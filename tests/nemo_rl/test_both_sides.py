"""Policy and rollout dtypes of a NeMo-RL job: reports of driver and plan, config of the rollout.

The configs of NeMo-RL's checkout pass through NeMo-RL's own loader, its own
``configure_generation_config`` and its own ``setup``, until the first worker would start.
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

import precision_shim
from precision_shim.errors import DtypeError, UnsupportedPrecisionError
from precision_shim_adapters.nemo_rl import config as reader
from precision_shim_adapters.nemo_rl import rollout
from precision_shim_adapters.nemo_rl.config import is_read

from ..every_framework import both_sides as both
from ..pages.page_jobs import of
from ..processes.rank_server import Ranks
from ..processes.ray_cluster import drive
from ..stand_ins.planted_engines import plant
from . import setting_up
from .support import NEMO_RL
from .test_pages import loaded

GRPO = "examples/configs/grpo_math_1B.yaml"
SGLANG = "examples/configs/grpo_math_1B_sglang.yaml"
KEY = "policy.generation.vllm_cfg.precision"
HEAD = "++policy.hf_config_overrides={head_dtype: float32}"
needs_sglang = pytest.mark.skipif(Version("0.6") > NEMO_RL, reason="NeMo-RL has SGLang from 0.6 on")
needs_ppo = pytest.mark.skipif(Version("0.7") > NEMO_RL, reason="NeMo-RL has PPO from 0.7 on")


class Rollout(setting_up.Anything):
    """Stores the config from which NeMo-RL would start the rollout's workers."""

    config: Any = None

    def __init__(self, *args: object, **more: Any) -> None:
        found = more.get("config") or more.get("sglang_cfg")
        if isinstance(found, dict) and "backend" in found:  # Anything replaces others, too
            Rollout.config = found


@functools.cache
def _read(folder: Path, path: str, words: tuple[str, ...]) -> Any:
    job = replace(of("nemo-rl")[0], settings=("--config", path, *words))
    return loaded(job, folder)


def read(folder: Path, path: str, *words: str) -> Any:
    return copy.deepcopy(_read(folder, path, words))


def set_up(config: Any, monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[str, Any]:
    """Run NeMo-RL's set-up until the first worker; returns the config of the rollout's workers."""
    from nemo_rl.algorithms import grpo

    monkeypatch.setattr(setting_up, "Anything", Rollout)
    if hasattr(grpo, "SGLangGeneration"):
        monkeypatch.setattr(grpo, "SGLangGeneration", Rollout)
    setting_up.set_up(config, monkeypatch, folder)
    found: dict[str, Any] = Rollout.config
    return found


class Nemo(both.Sides):
    """NeMo-RL's own set-up, up to the first worker."""

    framework, model, key, written = "nemo-rl", "policy", KEY, "bf16"

    def __init__(self, checkout: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.checkout, self.folder, self.monkeypatch = checkout, folder, monkeypatch

    def job(self, trainer: str, rollout: str, *more: str, **model: str) -> tuple[str, ...]:
        written = (f"{KEY}={rollout}",) if rollout else ()
        if model:
            path = self.folder / "model"
            path.mkdir()
            (path / "config.json").write_text(json.dumps(model))
            written += (f"policy.model_name={path}",)
        return (f"policy.precision={both.DTYPES[trainer]}", *written, *more)

    def served_in_fp32(self) -> tuple[str, ...]:
        return self.job("bf16", "bf16", HEAD)

    def read(self, *words: str, path: str = GRPO) -> Any:
        return read(self.checkout, path, *words)

    def set_up(self, config: Any) -> Any:
        return set_up(config, self.monkeypatch, self.folder)

    def run(self, job: tuple[str, ...]) -> Any:
        return self.set_up(self.read(*job))

    def handed(self, made: Any) -> str:
        return str(made["vllm_cfg"]["precision"])

    def line(self, job: tuple[str, ...], path: str = GRPO) -> tuple[str, ...]:
        script = ("uv", "run", "examples/nemo_rl/run_grpo.py")
        return (*script, "--config", str(self.checkout / path), *job)

    def begin(self, module_name: str, config: Any) -> None:
        """Run a loop's own set-up until its first call."""
        module = importlib.import_module(f"nemo_rl.algorithms.{module_name}")
        self.monkeypatch.setattr(module, "set_seed", both.stop)
        given = [config, None, [{}], [{}]]
        with pytest.raises(both.StopError):
            module.setup(*given)


@pytest.fixture
def sides(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nemo:
    return Nemo(checkout, tmp_path, monkeypatch)


class TestBothSides(both.BothSides, both.Names, both.Planned, both.NoHead):
    pass


MOE = "policy.dtensor_cfg.moe_parallelizer"
OWN = f"++{MOE}={{lm_head_precision: float32, wrap_outer_model: false}}"
EXPERTS = ("policy.dtensor_cfg._v2=true", "++policy.dtensor_cfg.expert_parallel_size=2")


@pytest.mark.skipif(Version("0.6") > NEMO_RL, reason="NeMo-RL reads it from 0.6 on")
def test_automodels_own_lm_head(
    shim: Any, sides: Nemo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path / "engines", monkeypatch)
    job = sides.job("bf16", "bf16", OWN, *EXPERTS)
    shim(strict=True, export=False)
    assert sides.start(job).chosen["LM head"] == "fp32 in policy, the model's dtype in rollout"
    found = sides.start(sides.job("bf16", "bf16", OWN, EXPERTS[0]))
    assert found.chosen["LM head"] == "the model's dtype in policy and rollout"
    assert f"{MOE}.lm_head_precision=float32 takes effect with expert" in " ".join(found.notes)
    precision_shim.uninstall()
    shim(strict=True, export=False, settings={"head": "fp32"})
    for words, why in (
        ([OWN, *EXPERTS], "rollout: policy.hf_config_overrides.head_dtype changes the policy's"),
        ([OWN, EXPERTS[0]], f"{MOE}.lm_head_precision=float32 takes effect with expert"),
        ([OWN.replace(", wrap_outer_model: false", ""), *EXPERTS], "then rounds the logits"),
    ):
        with pytest.raises(UnsupportedPrecisionError, match=why):
            sides.run(sides.job("bf16", "bf16", *words))
    found = sides.start((*job, HEAD))
    assert found.chosen["LM head"] == "fp32 in trainer and rollout"
    given = found.made.get("vllm_kwargs") or found.made["vllm_cfg"]
    assert given["hf_overrides"] == {"head_dtype": "float32"}


def test_a_key_that_this_nemo_rl_does_not_read(sides: Nemo) -> None:
    config = {"megatron_cfg": {"enabled": True, "fp32_lm_head": "tf32"}}
    for read in (False, True):  # NeMo-RL's main reads it
        sides.monkeypatch.setattr(rollout, "is_read", lambda *_, read=read: read)
        head = rollout._own_head(config)
        assert head is not None
        key = "policy.megatron_cfg.fp32_lm_head=tf32"
        assert (head.key, head.in_fp32, head.idle) == (key, True, not read)
    assert not is_read("megatron", "fp32_lm_head")
    assert is_read("megatron", "moe_router_dtype")


NVFP4 = "in fp4 e2m1 (nvfp4, 1x16)"


@pytest.mark.parametrize(
    ("recipe", "made", "left_out"),
    [
        ("FP8_DEFAULT_CFG", "weights and activations in fp8 e4m3 (per tensor)", "lm_head"),
        ("NVFP4_DEFAULT_CFG", f"weights and activations {NVFP4}", "lm_head"),
        ("NVFP4_MLP_WEIGHT_ONLY_CFG", "weights in fp4 e2m1 (nvfp4, 1x32)", "all but mlp"),
        ("FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", "weights in fp8 e4m3 (blocks of 128x128)", "lm_head"),
        (
            "general/ptq/nvfp4_default-fp8_kv",
            f"weights and activations {NVFP4}, KV cache in fp8 e4m3 (per tensor)",
            "block_sparse_moe.gate",
        ),
        ("ABSENT_CFG", "layers in ABSENT_CFG (by ModelOpt)", "its recipe's exceptions"),
    ],
)
def test_a_recipe_of_modelopt(recipe: str, made: str, left_out: str) -> None:
    """The installed ModelOpt's recipes, which the adapter reads without importing ModelOpt."""
    found = reader.format_of({"quant_cfg": recipe}, "policy")
    assert found is not None
    text, _, others = str(found).partition("; not in ")
    assert (text, found.key) == (made, f"policy.quant_cfg={recipe}")
    assert others.startswith(left_out)


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_ppo  # sides_driver.py replaces names in 0.7's worker, which differs from other versions'
@pytest.mark.usefixtures("start_up_file")
def test_a_ray_actor_gets_what_the_driver_wrote(
    ranks: Ranks, checkout: Path, model: Path, tmp_path: Path
) -> None:
    """Runs NeMo-RL's own ``setup`` and the real worker that starts vLLM."""
    script = Path(__file__).with_name("sides_driver.py")
    jobs = drive(ranks, script, checkout, model, tmp_path, timeout=580, PRECISION_SHIM="1")
    assert len(jobs) == 2 * len(both.PAIRS)
    for job, made in jobs.items():
        policy, rollout, setting = job.split()
        computes = policy if setting == "follow" else rollout
        assert made["dtype"] == both.DTYPES[computes], job
        assert len(made["told"]) == ((policy, computes) == both.LOST), job


def test_strict_ends_before_a_worker_is_started_and_a_file_is_written(
    shim: Any, sides: Nemo
) -> None:
    shim(strict=True)
    Rollout.config = None
    with pytest.raises(UnsupportedPrecisionError):
        sides.run(sides.job("fp16", "bf16"))
    assert (Rollout.config, list(sides.folder.iterdir())) == (None, [])


NEEDED = "loss_fn.use_importance_sampling_correction=true"  # NeMo-RL requires it with fp8
KWARGS, VLLM = "policy.generation.vllm_kwargs", "policy.generation.vllm_cfg"
QUANTIZED = f"{KWARGS}.quantization=fp8"
AUTO, FP8 = "the checkpoint's dtype beside the policy's", "fp8 beside the policy's fp16"
AWAY = "not known here: vllm is not installed in this environment"  # but in the rollout's alone


@both.each(
    # The YAML's rollout dtype is an interpolation of ``policy.precision``.
    by_itself=both.Row("fp16 -", "fp16, as the policy", because=f"({KEY})"),
    auto=both.Row("bf16 auto", f"{AUTO} bf16", handed="auto"),
    slow_auto=both.Row("fp16 auto", f"{AUTO} fp16", handed="auto"),
    fp8_does_not_follow=both.Row(
        f"fp16 FP8 {NEEDED}",
        FP8,
        ("Quantize the layers of both in one format, or of neither.",),
        handed="fp8",
        follow="",
        because="beside which NeMo-RL gives vLLM bfloat16: its weights are rounded",
    ),
    quantized=both.Row(f"fp16 bf16 ++{QUANTIZED}", FP8, handed="bfloat16", because=f"({QUANTIZED}"),
    slow_in_fewer_bits=both.Row(
        f"bf16 bf16 ++{KWARGS}.kv_cache_dtype=fp8 ++{KWARGS}.quantization=awq",
        "bf16 with awq weights and fp8 KV cache beside the policy's bf16",
    ),
)
class TestRows(both.Rows):
    planned = True


@both.each(
    auto_of_fp16=both.Row(
        "fp16 auto",
        "fp16, as the policy",
        handed="auto",
        model={"model_type": "qwen2", "torch_dtype": "float16"},
    ),
    auto_of_fp32=both.Row(
        "fp16 auto",
        f"{AUTO} fp16",
        handed="auto",
        because=AWAY,
        model={"model_type": "qwen2", "torch_dtype": "float32"},
    ),
)
class TestACheckpointsDtype(both.Rows):
    pass


# -- names -------------------------------------------------------------------------------------


def generation(precision: object, **more: Any) -> dict[str, Any]:
    return {
        "backend": "vllm",
        "stop_token_ids": None,
        "stop_strings": None,
        "vllm_cfg": {"precision": precision},
        **more,
    }


def complete(config: dict[str, Any], **more: Any) -> dict[str, Any]:
    from nemo_rl.models import generation as module

    tokenizer: Any = SimpleNamespace(pad_token_id=0, eos_token_id=1)
    found: dict[str, Any] = module.configure_generation_config(config, tokenizer, **more)
    return found


SPELLINGS = {"FP16": "float16", "half": "float16", "torch.bfloat16": "bfloat16", "Float": "float32"}


@pytest.mark.parametrize("is_eval", [False, True])
def test_names(shim: Any, is_eval: bool) -> None:
    for name in SPELLINGS:
        assert complete(generation(name), is_eval=is_eval)["vllm_cfg"]["precision"] == name
    shim()
    for name, own in SPELLINGS.items():
        assert complete(generation(name), is_eval=is_eval)["vllm_cfg"]["precision"] == own
    assert "precision" not in complete({**generation(None), "vllm_cfg": {}})["vllm_cfg"]


@pytest.mark.parametrize("name", ["fp17", 3])
def test_a_wrong_name(shim: Any, name: object) -> None:
    shim()
    for is_eval, key in ((False, KEY), (True, "generation.vllm_cfg.precision")):
        with pytest.raises(DtypeError) as raised:
            complete(generation(name), is_eval=is_eval)
        text = str(raised.value)
        assert text.startswith("nemo-rl 0.")
        assert f": {key}={name!r} is not a dtype that this key takes" in text
        assert "auto, fp8. Correct" in text


def test_a_second_dtype_for_vllm(shim: Any) -> None:
    """NeMo-RL passes precision and dtype to one call, which raises a TypeError in an actor."""
    shim()
    with pytest.raises(DtypeError, match=r"generation\.vllm_kwargs\.dtype='half': NeMo-RL passes"):
        complete(generation("bf16", vllm_kwargs={"dtype": "half"}))
    assert complete(generation("bf16", vllm_kwargs={"seed": 1}))


# -- SGLang ------------------------------------------------------------------------------------


class Sglang(Nemo):
    """The same of a job whose rollout is SGLang, and whose key of the dtype may be left out."""

    key = "policy.generation.sglang_cfg.dtype"

    def job(self, trainer: str, rollout: str, *more: str, **model: str) -> tuple[str, ...]:
        written = f"{self.key}={rollout}" if rollout else f"~{self.key}"
        return (f"policy.precision={both.DTYPES[trainer]}", written)

    def run(self, job: tuple[str, ...]) -> Any:
        return self.set_up(self.read(*job, path=SGLANG))

    def handed(self, made: Any) -> str:
        return str(made["sglang_cfg"].get("dtype"))

    def line(self, job: tuple[str, ...], path: str = SGLANG) -> tuple[str, ...]:
        return super().line(job, path)


@needs_sglang
@both.each(
    slow_bf16=both.Row("fp16 bf16", "bf16 beside the policy's fp16", ("the rollout in bf16",)),
    slow_follow=both.Row(
        "fp16 bf16", "fp16, as the policy", follow=f"{Sglang.key}: bfloat16 -> float16"
    ),
    # Without the key, SGLang's choice is not known.
    slow_left_out=both.Row(
        "fp16 -", f"{AUTO} fp16", handed="None", because=f"({Sglang.key} is left out: "
    ),
    slow_left_out_and_follow=both.Row(
        "fp16 -", "fp16, as the policy", follow=f"{Sglang.key}: not set -> float16"
    ),
)
class TestSglang(both.Rows):
    planned = True

    @pytest.fixture
    def sides(self, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sglang:
        return Sglang(checkout, tmp_path, monkeypatch)


# -- other loops -------------------------------------------------------------------------------


def plain(folder: Path, path: str, *overrides: str, into: str = "") -> Any:
    """A config that NeMo-RL's own loader reads, converted to a loop's config class."""
    from nemo_rl.utils import config as loader
    from omegaconf import OmegaConf

    register = getattr(loader, "register_omegaconf_resolvers", None)
    if register is not None:
        register()
    else:
        OmegaConf.register_new_resolver("mul", lambda a, b: a * b, replace=True)
    config = loader.parse_hydra_overrides(loader.load_config(folder / path), list(overrides))
    found = OmegaConf.to_container(config, resolve=True)
    if Version("0.7") > NEMO_RL:
        return found
    return importlib.import_module(f"nemo_rl.algorithms.{into}").MasterConfig(**found)


def begun(sides: Nemo, loop: str, config: Any) -> both.Started:
    sides.run = lambda config: sides.begin(loop, config)  # type: ignore[method-assign]
    return sides.start(config)


@both.each_setting
def test_a_teacher(shim: Any, sides: Nemo, follow: bool) -> None:
    path = "examples/configs/distillation_math.yaml"
    given = ("policy.precision=float16", "teacher.precision=bfloat16")
    config = plain(sides.checkout, path, *given, into="distillation")
    shim(settings=both.FOLLOW if follow else {})
    found = begun(sides, "distillation", config)
    keys = found.chosen.pop("dtype keys", "")
    assert list(found.chosen.values()) == [
        sides.beside("fp16", "fp16"),
        sides.beside("fp16", "fp16" if follow else "bf16"),
    ]
    if follow:
        part = config["teacher"] if isinstance(config, dict) else config.teacher
        assert part["precision"] == "float16"
        assert keys == "teacher.precision: bfloat16 -> float16"
    assert len(found.told) == (not follow)
    for text in found.told:
        assert "the two round differently, which adds to the KL term" in text
        assert "Write teacher.precision=float16" in text


@needs_ppo
def test_ppo(shim: Any, sides: Nemo) -> None:
    path = "examples/configs/ppo_math_1B.yaml"
    config = plain(sides.checkout, path, *sides.job("fp16", "bfloat16"), into="ppo")
    shim()
    found = begun(sides, "ppo", config)
    assert found.chosen == {"rollout": sides.beside("fp16", "bf16")}
    assert len(found.told) == 1


def test_a_rollout_of_megatrons_computes_as_the_policy(shim: Any, sides: Nemo) -> None:
    config = sides.read("policy.precision=float16", "policy.generation.backend=megatron")
    shim(strict=True)
    found = begun(sides, "grpo", config)
    assert found.chosen == {"rollout": "fp16, as the policy"}
    assert "(policy.generation.backend is 'megatron'" in found.notes[0]


def test_a_name_that_nemo_rl_does_not_take_is_left_to_it(shim: Any, sides: Nemo) -> None:
    config = sides.read("policy.precision=fp16", f"{KEY}=bfloat16")
    shim(strict=True)
    assert begun(sides, "grpo", config).chosen == {}


# -- the plan ----------------------------------------------------------------------------------


def test_the_plan_tells_that_vllm_keeps_its_cache_in_fp8_too(sides: Nemo) -> None:
    """NeMo-RL allows it only with Megatron."""
    job = sides.job("bf16", "fp8", f"++{VLLM}.kv_cache_dtype=fp8_e4m3")
    _, (note,) = both.of_plan(sides.line((*job, f"++{KWARGS}.kv_cache_dtype=auto")))
    with_it = "fp8 with fp8_e4m3 KV cache beside the policy's bf16"
    assert note.startswith(f"rollout: rollout-agreement: {with_it} ({VLLM}.precision=fp8, ")
    assert f"{VLLM}.kv_cache_dtype=fp8_e4m3" in note


def test_the_plan_names_a_key_that_it_cannot_resolve(sides: Nemo) -> None:
    given = "policy.model_name='${oc.env:SET_IN_THE_JOB_ALONE}'"
    notes = [both.plan_of(sides.line(one))["notes"] for one in ((), (given,))]
    keys = [[one for one in found if "policy.model_name" in one] for found in notes]
    assert [len(found) for found in keys] == [0, 1]
    assert keys[1][0].startswith("not resolved on this machine, and read as left out: ")


@pytest.mark.parametrize(
    ("backend", "section"), [("trtllm", "trtllm_cfg"), ("dynamo", "vllm_cfg"), ("tgi", "vllm_cfg")]
)
def test_further_backends_of_nemo_rls_main(sides: Nemo, backend: str, section: str) -> None:
    """NeMo-RL passes each one's ``precision`` to its engine; for Dynamo it takes bf16 alone."""
    place = "policy.generation"
    words = (f"{place}.backend={backend}", f"++{place}.{section}.precision=bfloat16")
    problems, notes = both.of_plan(sides.line((*words, "policy.precision=float16")))
    assert len(problems) == (backend != "tgi")
    remedy = f"Write {place}.{section}.precision=float16"
    if backend == "dynamo":
        remedy = "Train in bf16 (policy.precision), and let the rollout compute in bf16."
    assert all(remedy in one for one in problems)
    assert ("bf16 beside the policy's fp16" in " ".join(notes)) == (backend != "tgi")


@pytest.mark.parametrize("transport", ["nixl", "vllm_zmq_sparse", "nccl_reshard", ""])
def test_a_transport_that_the_audit_does_not_see_is_told(sides: Nemo, transport: str) -> None:
    words = (f"++policy.generation.refit_transport={transport}",) if transport else ()
    _, notes = both.of_plan(sides.line(words), about="weight sync: audit: ")
    assert len(notes) == len(words)
    assert all(f"refit_transport={transport}: the sent" in one for one in notes)


# -- the weights -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), [("v1", "bfloat16"), ("v2", "float16")])
def test_the_weights_are_rounded_once(
    worker: Any, shim: Any, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str
) -> None:
    """fp32 parameters are rounded once, to ``policy.precision``, with the shim and without."""
    from .support import batch, loss_for, parameters

    def sent(made: Any) -> dict[str, torch.Tensor]:
        from nemo_rl.models.policy import utils

        found: dict[str, torch.Tensor] = {}

        def keep(params_generator: Any, **more: Any) -> None:
            found.update((name, one.clone()) for name, one in params_generator)

        monkeypatch.setattr(utils, "stream_weights_via_ipc_zmq_impl", keep)
        made.zmq_socket = None
        made.stream_weights_via_ipc_zmq(buffer_size_bytes=2**20)
        return found

    shim()
    with worker(kind, dtype) as made:
        made.train(batch(), loss_for(kind), gbs=4, mbs=2)  # changes the weights
        ours, held = sent(made), parameters(made)
        precision_shim.uninstall()
        theirs = sent(made)
    assert held.keys() <= ours.keys() == theirs.keys()
    for name, one in ours.items():
        assert torch.equal(one, theirs[name])
        assert one.dtype is getattr(torch, dtype)
        if name in held:
            assert held[name].dtype is torch.float32
            assert torch.equal(one, held[name].to(one.dtype)), name
    assert len(held) > 10
