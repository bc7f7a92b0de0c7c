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
from precision_shim_tools.cli import main

from ..every_framework.shim_warnings import watched
from ..pages.page_jobs import of
from ..processes.rank_server import Ranks
from ..processes.ray_cluster import drive
from . import setting_up
from .support import NEMO_RL
from .test_pages import checkout, loaded  # noqa: F401

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
PAIRS = [("fp16", "fp16"), ("fp16", "bf16"), ("bf16", "fp16"), ("fp32", "bf16")]
LOST = [("fp16", "bf16")]
GRPO = "examples/configs/grpo_math_1B.yaml"
SGLANG = "examples/configs/grpo_math_1B_sglang.yaml"
KEY = "policy.generation.vllm_cfg.precision"
FOLLOW = {"rollout": "follow"}
KINDS = ("v1", "v2")
needs_sglang = pytest.mark.skipif(Version("0.6") > NEMO_RL, reason="NeMo-RL has SGLang from 0.6 on")
needs_ppo = pytest.mark.skipif(Version("0.7") > NEMO_RL, reason="NeMo-RL has PPO from 0.7 on")


class StopError(Exception):
    """Raised when a loop's set-up makes its first call."""


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


def decisions() -> list[tuple[str, str, str]]:
    return [
        (one.subject, one.chosen, one.because)
        for one in precision_shim.status().decisions
        if (one.framework, one.feature) == ("nemo-rl", "rollout-agreement")
    ]


def chosen(policy: str, other: str) -> str:
    return f"{other}, as the policy" if policy == other else f"{other} beside the policy's {policy}"


def words(policy: str, rollout: str) -> tuple[str, ...]:
    """Overrides for two dtypes; the rollout's short name, such as fp16, needs the shim."""
    return (f"policy.precision={DTYPES[policy]}", f"{KEY}={rollout}")


# -- the driver's messages, and the rollout's dtype --------------------------------------------


@pytest.mark.parametrize("settings", [{}, FOLLOW], ids=["tell", "follow"])
@pytest.mark.parametrize(("policy", "rollout"), PAIRS)
def test_the_driver_tells(
    checkout: Path,  # noqa: F811
    shim: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    policy: str,
    rollout: str,
    settings: dict[str, str],
) -> None:
    config = read(checkout, GRPO, *words(policy, rollout))
    shim(settings=settings)
    given, told = watched(lambda: set_up(config, monkeypatch, tmp_path))
    computes, found = policy if settings else rollout, decisions()
    if settings and policy != rollout:
        replaced = f"{KEY}: {DTYPES[rollout]} -> {DTYPES[policy]}"
        assert found.pop(0)[:2] == ("dtype keys", replaced)
    assert [one[:2] for one in found] == [("rollout", chosen(policy, computes))]
    assert given["vllm_cfg"]["precision"] == DTYPES[computes]
    assert len(told) == ((policy, computes) in LOST)
    for text in told:
        assert text.startswith("nemo-rl 0.")
        assert f": the policy computes in fp16 (policy.precision), the rollout in {rollout}" in text
        assert f"Write {KEY}=float16, or set PRECISION_SHIM_ROLLOUT=follow" in text


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_ppo  # sides_driver.py replaces names in 0.7's worker, which differs from other versions'
@pytest.mark.usefixtures("start_up_file")
def test_a_ray_actor_gets_what_the_driver_wrote(
    ranks: Ranks,
    checkout: Path,  # noqa: F811
    model: Path,
    tmp_path: Path,
) -> None:
    """Runs NeMo-RL's own ``setup`` and the real worker that starts vLLM."""
    script = Path(__file__).with_name("sides_driver.py")
    jobs = drive(ranks, script, checkout, model, tmp_path, timeout=580, PRECISION_SHIM="1")
    assert len(jobs) == 2 * len(PAIRS)
    for job, made in jobs.items():
        policy, rollout, setting = job.split()
        computes = policy if setting == "follow" else rollout
        assert made["dtype"] == DTYPES[computes], job
        assert len(made["told"]) == ((policy, computes) in LOST), job


def test_the_rollout_has_the_policys_dtype_by_itself(
    checkout: Path,  # noqa: F811
    shim: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The YAML's rollout dtype is an interpolation of ``policy.precision``."""
    config = read(checkout, GRPO, "policy.precision=float16")
    shim(strict=True)
    given, told = watched(lambda: set_up(config, monkeypatch, tmp_path))
    assert (given["vllm_cfg"]["precision"], told) == ("float16", [])
    assert decisions() == [("rollout", chosen("fp16", "fp16"), KEY)]


def test_strict(
    checkout: Path,  # noqa: F811
    shim: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Strict raises before a worker is started and before a file is written."""
    config = read(checkout, GRPO, *words("fp16", "bf16"))
    shim(strict=True)
    Rollout.config = None
    with pytest.raises(UnsupportedPrecisionError, match=r"vllm_cfg\.precision=float16"):
        set_up(config, monkeypatch, tmp_path)
    assert Rollout.config is None
    assert list(tmp_path.iterdir()) == []
    assert [one[:2] for one in decisions()] == [("rollout", chosen("fp16", "bf16"))]


def test_off_nothing_is_said_and_no_name_is_changed(
    checkout: Path,  # noqa: F811
    shim: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    config = read(checkout, GRPO, *words("fp16", "bf16"))
    shim(features="-rollout-agreement", settings=FOLLOW)
    given, told = watched(lambda: set_up(config, monkeypatch, tmp_path))
    assert (given["vllm_cfg"]["precision"], told, decisions()) == ("bf16", [], [])


@pytest.mark.parametrize(("policy", "rollout"), [("bf16", "auto"), ("fp16", "FP8")])
def test_what_is_no_dtype_stays(
    checkout: Path,  # noqa: F811
    shim: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    policy: str,
    rollout: str,
) -> None:
    config = read(
        checkout,
        GRPO,
        *words(policy, rollout),
        "loss_fn.use_importance_sampling_correction=true",  # NeMo-RL requires it with fp8
    )
    shim(settings=FOLLOW if rollout == "FP8" else {})  # fp8 weights do not follow
    given, told = watched(lambda: set_up(config, monkeypatch, tmp_path))
    assert given["vllm_cfg"]["precision"] == rollout.lower()
    ((subject, chose, because),) = decisions()
    what = "fp8" if rollout == "FP8" else "the checkpoint's dtype"
    assert (subject, chose) == ("rollout", f"{what} beside the policy's {policy}")
    if rollout == "FP8":
        assert "beside which NeMo-RL gives vLLM bfloat16: its weights are rounded" in because
    assert told == []


def test_vllms_own_quantisation(
    checkout: Path,  # noqa: F811
    shim: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    quantised = "++policy.generation.vllm_kwargs.quantization=fp8"
    config = read(checkout, GRPO, *words("fp16", "bf16"), quantised)
    shim(strict=True)
    _, told = watched(lambda: set_up(config, monkeypatch, tmp_path))
    assert told == []
    ((subject, chose, because),) = decisions()
    assert (subject, chose) == ("rollout", "fp8 beside the policy's fp16")
    assert because.startswith("policy.generation.vllm_kwargs.quantization=fp8: ")


@pytest.mark.parametrize(("stored", "takes"), [("float16", "fp16"), ("float32", "")])
def test_auto_is_what_vllm_makes_of_the_checkpoint(
    checkout: Path,  # noqa: F811
    shim: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    stored: str,
    takes: str,
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2", "torch_dtype": stored}))
    config = read(checkout, GRPO, *words("fp16", "auto"), f"policy.model_name={model}")
    shim()
    given, told = watched(lambda: set_up(config, monkeypatch, tmp_path))
    assert given["vllm_cfg"]["precision"] == "auto"
    ((subject, chose, because),) = decisions()
    unknown = "the checkpoint's dtype beside the policy's fp16"
    assert (subject, chose) == ("rollout", chosen("fp16", takes) if takes else unknown)
    if not takes:  # vLLM is in the rollout's environment alone
        assert "not known here: vllm is not installed in this environment" in because
    assert len(told) == (takes != "fp16")


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
        assert f": {key}={name!r} is no dtype that a rollout engine computes in" in text
        assert "auto, fp8. Correct" in text


def test_a_second_dtype_for_vllm(shim: Any) -> None:
    """NeMo-RL passes precision and dtype to one call, which raises a TypeError in an actor."""
    shim()
    with pytest.raises(DtypeError, match=r"generation\.vllm_kwargs\.dtype='half': NeMo-RL passes"):
        complete(generation("bf16", vllm_kwargs={"dtype": "half"}))
    assert complete(generation("bf16", vllm_kwargs={"seed": 1}))


# -- SGLang ------------------------------------------------------------------------------------


def without_dtype(config: Any) -> Any:
    setting_up.policy_of(config)["generation"]["sglang_cfg"].pop("dtype", None)
    return config


@pytest.mark.slow
@needs_sglang
@pytest.mark.parametrize("rollout", ["bf16", ""])
@pytest.mark.parametrize("settings", [{}, FOLLOW], ids=["tell", "follow"])
def test_sglangs_key_may_be_left_out(
    checkout: Path,  # noqa: F811
    shim: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    rollout: str,
    settings: dict[str, str],
) -> None:
    key = "policy.generation.sglang_cfg.dtype"
    config = read(checkout, SGLANG, "policy.precision=float16", f"{key}={rollout or 'auto'}")
    if not rollout:
        without_dtype(config)
    shim(settings=settings)
    given, told = watched(lambda: set_up(config, monkeypatch, tmp_path))
    *keys, (subject, chose, because) = decisions()
    assert subject == "rollout"
    if settings:
        before = "bfloat16" if rollout else "not set"
        assert keys[0][:2] == ("dtype keys", f"{key}: {before} -> float16")
        assert chose == chosen("fp16", "fp16")
        assert (given["sglang_cfg"]["dtype"], told) == ("float16", [])
        return
    assert (keys, len(told)) == ([], 1)
    if rollout:
        assert (given["sglang_cfg"]["dtype"], chose) == ("bfloat16", chosen("fp16", "bf16"))
    else:
        assert chose == "the checkpoint's dtype beside the policy's fp16"
        assert because.startswith(f"{key} is left out: ")
        assert "dtype" not in given["sglang_cfg"]


# -- other loops -------------------------------------------------------------------------------


def begin(module_name: str, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a loop's own set-up until its first call."""
    module = importlib.import_module(f"nemo_rl.algorithms.{module_name}")

    def stop(*args: object) -> None:
        raise StopError

    monkeypatch.setattr(module, "set_seed", stop)
    given = [config, None, [{}], [{}]]
    with pytest.raises(StopError):
        module.setup(*given)


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


@pytest.mark.parametrize("settings", [{}, FOLLOW], ids=["tell", "follow"])
def test_a_teacher(
    checkout: Path,  # noqa: F811
    shim: Any,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, str],
) -> None:
    path = "examples/configs/distillation_math.yaml"
    given = ("policy.precision=float16", "teacher.precision=bfloat16")
    config = plain(checkout, path, *given, into="distillation")
    shim(settings=settings)
    _, told = watched(lambda: begin("distillation", config, monkeypatch))
    *keys, (_, rollout, _), (_, teacher, _) = decisions()
    assert (rollout, teacher) == (
        chosen("fp16", "fp16"),
        chosen("fp16", "fp16" if settings else "bf16"),
    )
    if settings:
        part = config["teacher"] if isinstance(config, dict) else config.teacher
        assert part["precision"] == "float16"
        assert keys[0][1] == "teacher.precision: bfloat16 -> float16"
    assert len(told) == (not settings)
    for text in told:
        assert "the two round differently, which adds to the KL term" in text
        assert "Write teacher.precision=float16" in text


@needs_ppo
def test_ppo(checkout: Path, shim: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    path = "examples/configs/ppo_math_1B.yaml"
    config = plain(checkout, path, *words("fp16", "bfloat16"), into="ppo")
    shim()
    _, told = watched(lambda: begin("ppo", config, monkeypatch))
    assert [one[:2] for one in decisions()] == [("rollout", chosen("fp16", "bf16"))]
    assert len(told) == 1


def test_a_rollout_of_megatrons_computes_as_the_policy(
    checkout: Path,  # noqa: F811
    shim: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = read(checkout, GRPO, "policy.precision=float16", "policy.generation.backend=megatron")
    shim(strict=True)
    begin("grpo", config, monkeypatch)
    ((subject, chose, because),) = decisions()
    assert (subject, chose) == ("rollout", "fp16, as the policy")
    assert because.startswith("policy.generation.backend is 'megatron'")


def test_a_name_that_nemo_rl_does_not_take_is_left_to_it(
    checkout: Path,  # noqa: F811
    shim: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = read(checkout, GRPO, "policy.precision=fp16", f"{KEY}=bfloat16")
    shim(strict=True)
    begin("grpo", config, monkeypatch)
    assert decisions() == []


# -- the plan ----------------------------------------------------------------------------------


def planned(capsys: pytest.CaptureFixture[str], path: Path, *given: str) -> dict[str, Any]:
    command = ("uv", "run", "examples/nemo_rl/run_grpo.py", "--config", str(path), *given)
    with pytest.raises(SystemExit) as end:
        main(["plan", "--json", "--parameters", "600M", "--", *command])
    said = capsys.readouterr()
    assert end.value.code in (0, 1), said.err
    found: dict[str, Any] = json.loads(said.out)
    return found


def of_plan(found: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The plan's problems and notes on the dtypes of policy and rollout."""
    ours = [one for one in found["problems"] if one["code"] == "rollout-dtype"]
    notes = [one for one in found["notes"] if "rollout-agreement" in one]
    return [f"{one['message']}. {one['remedy']}" for one in ours], notes


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["tell", "follow"])
@pytest.mark.parametrize("rollout", ["fp16", "bf16", "auto", "fp8"])
def test_the_plan_says_what_the_driver_says(
    checkout: Path,  # noqa: F811
    shim: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    rollout: str,
    setting: str,
) -> None:
    given = words("fp16", rollout)
    monkeypatch.setenv("PRECISION_SHIM_ROLLOUT", setting)
    problems, notes = of_plan(planned(capsys, checkout / GRPO, *given))
    config = read(checkout, GRPO, *given)
    shim(settings={"rollout": setting})
    setting_up.policy_of(config)["generation"] = complete(
        setting_up.policy_of(config)["generation"]
    )
    _, told = watched(lambda: begin("grpo", config, monkeypatch))
    assert problems == told
    assert notes == [f"{one[0]}: rollout-agreement: {one[1]} ({one[2]})" for one in decisions()]


@pytest.mark.slow
@needs_sglang
@pytest.mark.parametrize("rollout", ["tell", "follow"])
def test_the_plan_of_sglang_without_the_key(
    checkout: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    rollout: str,
) -> None:
    monkeypatch.setenv("PRECISION_SHIM_ROLLOUT", rollout)
    given = ("policy.precision=float16", "~policy.generation.sglang_cfg.dtype")
    problems, notes = of_plan(planned(capsys, checkout / SGLANG, *given))
    follows = rollout == "follow"
    assert bool(problems) is not follows
    assert ("PRECISION_SHIM_ROLLOUT=follow" in notes[-1]) is follows


def test_the_plan_and_a_wrong_name(
    checkout: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    (problem,) = planned(capsys, checkout / GRPO, f"{KEY}=fp17")["problems"]
    assert (problem["code"], problem["key"]) == ("dtype", KEY)


def test_the_plan_names_a_key_that_it_cannot_resolve(
    checkout: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = "policy.model_name='${oc.env:SET_IN_THE_JOB_ALONE}'"
    notes = [planned(capsys, checkout / GRPO, *one)["notes"] for one in ((), (given,))]
    keys = [[one for one in found if "policy.model_name" in one] for found in notes]
    assert [len(found) for found in keys] == [0, 1]
    assert keys[1][0].startswith("not resolved on this machine, and read as left out: ")


# -- the weights -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
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


# -- the LM head -------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
def test_an_fp32_head_is_refused(
    checkout: Path,  # noqa: F811
    shim: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    strict: bool,
) -> None:
    shim(settings={"head": "fp32"}, strict=strict, export=False)
    config = read(checkout, GRPO, "policy.precision=bfloat16")
    if strict:
        with pytest.raises(UnsupportedPrecisionError, match="does not change the LM heads"):
            set_up(config, monkeypatch, tmp_path)
        return
    given, told = watched(lambda: set_up(config, monkeypatch, tmp_path))
    (refusal,) = told
    assert "PRECISION_SHIM_HEAD=fp32 is refused" in refusal
    section = "vllm_cfg" if Version("0.6") > NEMO_RL else "vllm_kwargs"
    assert not given[section]["hf_overrides"]
    assert not (given.get("vllm_kwargs") or {}).get("hf_overrides")
    monkeypatch.setenv("PRECISION_SHIM_HEAD", "fp32")
    capsys.readouterr()  # NeMo-RL has printed its config
    found = planned(capsys, checkout / GRPO, "policy.precision=bfloat16")["problems"]
    assert [f"{one['message']}. {one['remedy']}" for one in found] == [refusal]


def test_the_plan_tells_what_vllm_keeps_in_fewer_bits(
    checkout: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    kwargs = "++policy.generation.vllm_kwargs"
    given = (f"{kwargs}.kv_cache_dtype=fp8", f"{kwargs}.quantization=awq")
    _, (note,) = of_plan(planned(capsys, checkout / GRPO, *given))
    with_it = "bf16 with awq weights and fp8 KV cache beside the policy's bf16"
    assert note.startswith(f"rollout: rollout-agreement: {with_it} (")
    vllm = "policy.generation.vllm_cfg"
    given = (
        f"{vllm}.precision=fp8",
        f"++{vllm}.kv_cache_dtype=fp8_e4m3",
        f"{kwargs}.kv_cache_dtype=auto",
    )
    _, (note,) = of_plan(planned(capsys, checkout / GRPO, *given))
    with_it = "fp8 with fp8_e4m3 KV cache beside the policy's bf16"
    assert note.startswith(f"rollout: rollout-agreement: {with_it} ({vllm}.precision=fp8, ")
    assert f"{vllm}.kv_cache_dtype=fp8_e4m3" in note
