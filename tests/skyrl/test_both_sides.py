"""Compute dtypes of policy, reference model and inference engines in SkyRL's jobs."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

import precision_shim
from precision_shim.errors import DtypeError, UnsupportedPrecisionError
from precision_shim.precision.dtypes import name_of

from ..every_framework import both_sides as both
from ..processes.commands import python
from ..processes.rank_server import Ranks
from ..processes.ray_cluster import drive
from ..stand_ins.planted_engines import plant_choices
from .conftest import SKYRL
from .support import (
    batch,
    build,
    equal_streams,
    fsdp_worker,
    train_config,
    weights_rounded_once,
    weights_sent,
)
from .test_pages import as_on_a_new_machine  # noqa: F401
from .vllm_names import engine_dtype, put_in_place

ENTRY = "skyrl.train.entrypoints.main_base"
KEY = "generator.inference_engine.model_dtype"
OVER = "generator.inference_engine.engine_init_kwargs"
REF = "trainer.ref.fsdp_config.mixed_precision.param_dtype"
POLICY = "trainer.policy.fsdp_config.mixed_precision.param_dtype"
FSDP = "fsdp2" if Version("0.3") > SKYRL else "fsdp"

since_0_4 = pytest.mark.skipif(Version("0.4") > SKYRL, reason="SkyRL has it from 0.4")


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch, skyrl: None) -> None:
    put_in_place(monkeypatch)


def validated(*words: str, config: Any = None) -> Any:
    """The config after the validation that SkyRL's entry point runs before it starts Ray."""
    from skyrl.train.utils.utils import validate_cfg

    config = config or train_config(*words)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        validate_cfg(config)
    return config


def on_fsdp(policy: str, *words: str) -> tuple[str, ...]:
    return (f"trainer.strategy={FSDP}", "trainer.policy.model.path=m", f"{POLICY}={policy}", *words)


def on_megatron(model: Path, policy: str, *words: str) -> tuple[str, ...]:
    kwargs = "trainer.policy.megatron_config.transformer_config_kwargs.fp16=true"
    return (
        "trainer.strategy=megatron",
        f"trainer.policy.model.path={model}",
        f"trainer.bf16={str(policy == 'bf16').lower()}",
        *([kwargs] if policy == "fp16" else []),
        *words,
    )


NO_REF = "trainer.algorithm.use_kl_loss=false"


def told() -> dict[str, str]:
    """The shim's decisions on dtypes, by subject: rollout, ref or policy."""
    found = precision_shim.status().decisions
    return {one.subject: one.chosen for one in found if one.feature == "rollout-agreement"}


def line(*words: str) -> tuple[str, ...]:
    return words if words[0] == "python3" else ("python3", "-m", ENTRY, *words)


def planned(*words: str) -> tuple[list[str], list[str]]:
    """The plan's problems with the rollout's dtype, and its notes on that dtype."""
    return both.of_plan(line(*words))


def notes_of_decisions() -> list[str]:
    return [
        f"{one.subject}: rollout-agreement: {one.chosen} ({one.because})"
        for one in precision_shim.status().decisions
        if one.feature == "rollout-agreement"
    ]


# -- tell and follow -----------------------------------------------------------------------------


AGREED, LOST = "fp16, as the policy", "bf16 beside the policy's fp16"
LOW, HIGH = "bf16, as the policy", "fp16 beside the policy's bf16"
AGREE = {"ref": AGREED, "rollout": AGREED}


def _model(path: Path) -> tuple[str, ...]:
    return (f"trainer.policy.model.path={path}",)


class OnMegatron(both.Sides):
    """SkyRL's validation, which its entry point runs before it starts Ray."""

    framework, model, key = "skyrl", "policy", KEY

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint

    def job(self, trainer: str, rollout: str, *more: str) -> tuple[str, ...]:
        return on_megatron(self.checkpoint, trainer, NO_REF, f"{KEY}={rollout}", *more)

    def run(self, job: tuple[str, ...]) -> Any:
        return validated(*job)

    def handed(self, made: Any) -> str:
        return engine_dtype(made)

    def line(self, job: tuple[str, ...]) -> tuple[str, ...]:
        return line(*job)


class OnFsdp(OnMegatron):
    """The same of a job on FSDP, whose checkpoint's config a row may have."""

    def job(self, trainer: str, rollout: str, *more: str, **model: str) -> tuple[str, ...]:
        written = (f"{KEY}={rollout}",) if rollout else ()
        if model:
            (self.checkpoint / "config.json").write_text(json.dumps(model))
            written += _model(self.checkpoint)
        return on_fsdp(trainer, *written, *more)


class TestBothSides(both.BothSides, both.Names, both.Planned):
    @pytest.fixture
    def sides(self, checkpoints: dict[str, Path]) -> OnMegatron:
        return OnMegatron(checkpoints["bfloat16"])


def test_follow_keeps_the_other_dtypes_of_the_reference_model(shim: Any) -> None:
    shim(settings={"rollout": "follow"}, export=False)
    reduce_dtype = REF.replace("param", "reduce")
    config = validated(*on_fsdp("fp16", f"{REF}=bf16", f"{reduce_dtype}=bf16"))
    mixed = config.trainer.ref.fsdp_config.mixed_precision
    assert (mixed.param_dtype, mixed.reduce_dtype) == ("float16", "bf16")
    assert f"{REF}: bf16 -> float16; {KEY}: bfloat16 -> float16" == told()["dtype keys"]


@pytest.mark.slow
@pytest.mark.usefixtures("start_up_file")
@pytest.mark.timeout(400)
def test_a_ray_actor_gets_what_the_driver_wrote(ranks: Ranks, tmp_path: Path) -> None:
    """With SkyRL's ``main``; the shim is also in the actor's process."""
    script = Path(__file__).with_name("sides_driver.py")
    jobs = drive(ranks, script, timeout=380, PRECISION_SHIM="1")
    assert len(jobs) == 6
    for job, made in jobs.items():
        policy, rollout, setting = job.split()
        computes, own = (policy, policy) if setting == "follow" else (rollout, "bf16")
        assert made["rollout"] == both.DTYPES[computes], job
        assert made["reference"] == ("float16" if own == "fp16" else None), job
        assert made["wrapped"], job
        lost = [computes, own].count("bf16") if policy == "fp16" else 0
        assert len(made["told"]) == lost, job


def test_a_late_install_reaches_the_entry_point(shim: Any) -> None:
    """The shim also wraps SkyRL's entry point, which imports ``validate_cfg`` by value."""
    from skyrl.train.entrypoints import main_base

    plain = main_base.validate_cfg
    shim(export=False)
    _, messages = both.watched(
        lambda: main_base.validate_cfg(train_config(*on_fsdp("fp16", NO_REF)))
    )
    assert len(messages) == 1
    precision_shim.uninstall()
    assert main_base.validate_cfg is plain


def test_without_loss_scaling_an_fp16_policy_computes_in_bf16(
    shim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim(features="-fp16-scaling", export=False)
    _, warnings_ = both.watched(lambda: validated(*on_fsdp("fp16")))
    assert warnings_ == []
    assert told()["policy"] == "bf16"
    assert told()["rollout"] == "bf16, as the policy"
    monkeypatch.setenv("PRECISION_SHIM_FEATURES", "-fp16-scaling")
    assert planned(*on_fsdp("fp16")) == ([], notes_of_decisions())


# -- reported dtypes equal the workers' dtypes ---------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "dtype", "on"),
    [
        *(("policy", dtype, True) for dtype in (*both.DTYPES, None)),
        ("policy", "fp16", False),
        ("ref", "fp16", False),
        ("ref", "fp32", True),
    ],
)
def test_what_is_said_of_fsdp_is_what_a_worker_computes_in(
    cpu: None, checkpoints: dict[str, Path], shim: Any, role: str, dtype: str | None, on: bool
) -> None:
    from precision_shim_adapters.skyrl.rollout.dtypes import sides_of

    shim(features=None if on else "-fp16-scaling", export=False)
    worker = fsdp_worker(role, checkpoints["float32"], dtype)
    found: set[torch.dtype] = set()
    module = getattr(worker.model, "model", worker.model)
    for layer in module.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_hook(lambda layer, args, output: found.add(output.dtype))
    if role == "ref":
        worker.forward(batch(0))
    else:
        worker.forward_backward(batch(0))
    written = (
        ()
        if dtype is None
        else (f"trainer.{role}.fsdp_config.mixed_precision.param_dtype={dtype}",)
    )
    config = train_config(f"trainer.strategy={FSDP}", *written)
    sides = sides_of(config, lambda feature, group: on or feature != "fp16-scaling")
    said = sides.trainer if role == "policy" else sides.others[0]
    assert said is not None
    assert {name_of(one) for one in found} == {said.computes}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "bf16", "on"),
    [
        ("bfloat16", "false", True),
        ("float16", "true", True),
        ("float16", "false", True),
        ("float32", "true", False),
        ("float16", "false", False),
        ("float16", "true", False),
    ],
)
def test_what_is_said_of_megatron_is_what_a_worker_builds(
    fused_adam: str, checkpoints: dict[str, Path], shim: Any, dtype: str, bf16: str, on: bool
) -> None:
    from precision_shim_adapters.skyrl.config import megatron_dtype

    if on:
        shim(export=False)
    model = checkpoints[dtype]
    try:
        worker = build(model, f"trainer.bf16={bf16}")
    except AssertionError:
        assert (dtype, bf16, on) == ("float16", "true", False)
        return
    (computes,) = {one.dtype for chunk in worker.actor_module for one in chunk.parameters()}
    config = train_config("trainer.strategy=megatron", *_model(model), f"trainer.bf16={bf16}")
    assert megatron_dtype(config.trainer, "policy", lambda *_: on) is computes


def test_a_checkpoint_elsewhere(shim: Any) -> None:
    """With bf16=false only an fp16 checkpoint gives an fp16 policy; here no checkpoint exists."""
    shim(strict=True, export=False)
    validated(
        "trainer.strategy=megatron", "trainer.policy.model.path=no/such", "trainer.bf16=false"
    )
    assert told() == {"rollout": "not compared with the policy"}


KL, KWARGS = (
    NO_REF.replace("false", "true"),
    "trainer.ref.megatron_config.transformer_config_kwargs",
)


@pytest.mark.usefixtures("fused_adam")
@both.each(
    of_its_own=both.Row(f"fp16 half {KL}", {**AGREE, "ref": "fp32 beside the policy's fp16"}),
    in_fp16=both.Row(f"fp16 half {KL} {KWARGS}.fp16=true", AGREE),
    follow=both.Row(f"fp16 half {KL}", AGREE, follow=f"{KWARGS}.fp16: not set -> true"),
)
class TestAReferenceModelOnMegatron(both.Rows):
    @pytest.fixture
    def sides(self, checkpoints: dict[str, Path]) -> OnMegatron:
        return OnMegatron(checkpoints["bfloat16"])


def test_a_reference_model_on_megatron_follows_a_bf16_policy(
    checkpoints: dict[str, Path], shim: Any, fused_adam: str
) -> None:
    kwargs = "trainer.ref.megatron_config.transformer_config_kwargs"
    words = on_megatron(checkpoints["bfloat16"], "bf16", f"{kwargs}.fp16=true")
    shim(settings={"rollout": "follow"}, export=False)
    config = validated(*words)
    assert told()["ref"] == "bf16, as the policy"
    from precision_shim_adapters.skyrl.config import megatron_dtype

    assert megatron_dtype(config.trainer, "ref", lambda *_: True) is torch.bfloat16


# -- names ---------------------------------------------------------------------------------------


def test_names(shim: Any) -> None:
    shim(export=False)
    spelt, name = "torch.float16", "float16"
    from skyrl.train.config.config import InferenceEngineConfig
    from skyrl.train.utils.utils import str_to_torch_dtype, validate_generator_cfg

    config = validated(*on_fsdp("bf16", f"{KEY}={spelt}"))
    assert engine_dtype(config) == name
    assert str_to_torch_dtype(config.generator.inference_engine.model_dtype) is getattr(torch, name)
    assert InferenceEngineConfig(model_dtype=spelt).model_dtype == name
    config = train_config()
    config.generator.inference_engine.model_dtype = spelt
    validate_generator_cfg(config)
    assert engine_dtype(config) == name


@pytest.mark.parametrize("spelt", ["fp61", "null"])
def test_a_wrong_name(shim: Any, spelt: str) -> None:
    from skyrl.train.config.config import InferenceEngineConfig

    shim(export=False)
    words = on_fsdp("bf16", f"{KEY}={spelt}")
    with pytest.raises(DtypeError, match=f"skyrl {SKYRL}: {KEY}=") as raised:
        train_config(*words)
    assert raised.value.key == KEY
    with pytest.raises(DtypeError, match=KEY):
        InferenceEngineConfig(model_dtype=spelt)
    assert _dtype_problems(*words) == [KEY]


def test_a_wrong_name_that_is_assigned(shim: Any) -> None:
    shim(export=False)
    config = train_config(*on_fsdp("bf16"))
    config.generator.inference_engine.model_dtype = "fp61"
    with pytest.raises(DtypeError, match=KEY):
        validated(config=config)


def test_auto_is_for_jobs_without_a_weight_sync(shim: Any) -> None:
    shim(export=False)
    from skyrl.train.utils.utils import str_to_torch_dtype, validate_generator_cfg

    words = on_fsdp("bf16", f"{KEY}=auto")
    validate_generator_cfg(train_config(*words))
    with pytest.raises(DtypeError, match=KEY):
        validated(*words)
    assert _dtype_problems(*words) == [KEY]
    with pytest.raises(TypeError):
        str_to_torch_dtype("auto")


def _dtype_problems(*words: str) -> list[str]:
    """The keys of the plan's dtype problems; the command runs in a process without the shim."""
    precision_shim.uninstall()
    return [one["key"] for one in both.plan_of(line(*words))["problems"] if one["code"] == "dtype"]


@pytest.mark.skipif(Version("0.3") <= SKYRL, reason="SkyRL 0.3 has no old style any more")
@pytest.mark.parametrize("spelt", ["bfloat16", "half", "fp61"])
def test_the_old_style(shim: Any, monkeypatch: pytest.MonkeyPatch, spelt: str) -> None:
    import skyrl.train.config.utils as module
    from omegaconf import OmegaConf

    yaml = {"generator": {"backend": "vllm", "model_dtype": "bfloat16"}}
    monkeypatch.setattr(module, "get_legacy_config", lambda: OmegaConf.create(yaml))
    shim(export=False)
    words = on_fsdp("fp16", "generator.backend=vllm", NO_REF, f"generator.model_dtype={spelt}")
    if spelt == "fp61":
        with pytest.raises(DtypeError, match=KEY):
            train_config(*words)
        return
    config, messages = both.watched(lambda: validated(*words))
    assert len(messages) == (spelt == "bfloat16")
    assert engine_dtype(config) == ("float16" if spelt == "half" else "bfloat16")


# -- engines with their own dtype keys -----------------------------------------------------------


IN_FP16 = f"{REF}=fp16"
SENT = "weights go out in"
FP8 = "fp8 beside the policy's fp16"
URLS = (
    "generator.inference_engine.external_proxy_url=http://a:2 "
    "generator.inference_engine.external_server_urls=['http://a:1'] "
    "trainer.placement.colocate_all=false"
)


@both.each(
    all_in_fp16=both.Row(f"fp16 fp16 {IN_FP16}", AGREE),
    all_in_fp16_follow=both.Row(f"fp16 fp16 {IN_FP16}", AGREE, follow=""),
    lost=both.Row("fp16 bf16", {"ref": LOST, "rollout": LOST}, (f"Write {REF}=float16", KEY)),
    lost_and_follow=both.Row(
        "fp16 bf16", AGREE, follow=f"{REF}: not set -> float16; {KEY}: bfloat16 -> float16"
    ),
    bf16=both.Row(f"bf16 fp16 {IN_FP16}", {"ref": HIGH, "rollout": HIGH}),
    bf16_follow=both.Row(
        f"bf16 fp16 {IN_FP16}",
        {"ref": LOW, "rollout": LOW},
        follow=f"{REF}: fp16 -> bfloat16; {KEY}: float16 -> bfloat16",
    ),
    # SkyRL's autocast makes a policy or a reference model in fp32 compute in bf16.
    autocast=both.Row(
        f"fp32 fp32 {REF}=fp32",
        {"policy": "bf16", "ref": LOW, "rollout": "fp32 beside the policy's bf16"},
    ),
    autocast_and_follow=both.Row(
        f"fp32 fp32 {REF}=fp32",
        {"policy": "bf16", "ref": LOW, "rollout": LOW},
        follow=f"{KEY}: float32 -> bfloat16",
    ),
    over_the_key=both.Row(
        f"fp16 half {OVER}.dtype=BF16 {IN_FP16}",
        {"ref": AGREED, "rollout": f"{SENT} bf16"},
        (f"Write {OVER}.dtype=float16",),
        "bfloat16",
    ),
    follow=both.Row(
        f"fp16 half {OVER}.dtype=BF16 {IN_FP16}", AGREE, follow=f"{OVER}.dtype: bfloat16 -> float16"
    ),
    # SkyRL itself would round weights to bf16 before sending them to an fp16 engine.
    weights_go_out_in_its_dtype=both.Row(
        f"fp16 - {OVER}.dtype=half {IN_FP16}",
        {"ref": AGREED, "rollout": f"{SENT} fp16"},
        handed="float16",
        because=f"({KEY}: bfloat16 -> float16)",
    ),
    auto_of_fp16=both.Row(
        f"fp16 - {OVER}.dtype=auto {NO_REF}",
        f"{SENT} fp16",
        handed="auto",
        because=f"rollout: rollout-agreement: {AGREED} (",
        model={"model_type": "qwen2", "torch_dtype": "float16"},
    ),
    auto_of_fp32=both.Row(
        f"fp16 fp16 {OVER}.dtype=auto {NO_REF}",
        f"{SENT} bf16",
        ("the rollout in bf16",),
        "auto",
        because=f"rollout: rollout-agreement: {LOST} (",
        model={"model_type": "qwen2", "torch_dtype": "float32"},
    ),
    fp8=both.Row(
        f"fp16 - {OVER}.quantization=fp8 {NO_REF}",
        FP8,
        ("Quantize the layers of both in one format, or of neither.",),
        handed="bfloat16",
        follow="",
    ),
    servers_that_run_already=both.Row(
        f"fp16 - {URLS} {NO_REF}",
        LOST,
        ("if the servers that run already were started so",),
        follow="",
    ),
    refused=both.Row(
        f"fp16 fp16 {NO_REF}",
        "fp16",
        ("refuses to run gemma2 in fp16",),
        model={"model_type": "gemma2"},
    ),
)
class TestRows(both.Rows):
    planned = True

    @pytest.fixture
    def sides(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OnFsdp:
        plant_choices(tmp_path / "engines", monkeypatch)
        return OnFsdp(tmp_path)


def test_a_wrong_name_in_engine_init_kwargs(shim: Any) -> None:
    shim(export=False)
    words = on_fsdp("bf16", f"{OVER}.dtype=fp61")
    with pytest.raises(DtypeError, match=rf"{OVER}\.dtype='fp61'"):
        validated(*words)
    assert _dtype_problems(*words) == [f"{OVER}.dtype"]


@pytest.mark.slow
@since_0_4
def test_the_plan_names_a_package_that_skyrls_loader_lacks() -> None:
    line = ["plan", "--parameters", "1M", "--", "python3", "-m", ENTRY, "trainer.strategy=fsdp2"]
    code = "import sys; sys.modules['aiohttp'] = None; from precision_shim_tools.cli import main"
    done = python("-c", f"{code}; main({line})")
    assert done.returncode == 2
    said = done.stderr.splitlines()[-1]
    assert f"skyrl {SKYRL}: its own loader" in said
    assert "Install the package that has aiohttp, or run the plan in the environment" in said
    assert "Correct" not in said


# -- jobs without a rollout ----------------------------------------------------------------------


def test_fine_tuning_says_nothing(shim: Any, checkpoints: dict[str, Path]) -> None:
    from skyrl.train.config.sft_config import SFTConfig, build_skyrl_config_for_sft

    shim(strict=True, export=False)
    build_skyrl_config_for_sft(SFTConfig())
    assert told() == {}
    half = "fsdp_config.mixed_precision.param_dtype=fp16"
    assert planned("python3", "-m", "skyrl.train.main_sft", half) == ([], [])


def test_a_tinker_server(shim: Any) -> None:
    module = pytest.importorskip(
        "skyrl.backends.skyrl_train_backend", reason="the Tinker server's packages are not here"
    )
    shim(export=False)
    overrides = {POLICY: "fp16", KEY: "half", "trainer.logger": "console"}
    made = module.FSDPBackendOverrides(**overrides)
    config = module._build_skyrl_train_config("m", made)
    assert config.generator.inference_engine.model_dtype == "float16"
    assert told() == {"rollout": "fp16, as the policy"}


# -- weights that are sent -----------------------------------------------------------------------


def trained(checkpoint: Path, dtype: str | None = None, *overrides: str) -> Any:
    """A worker whose fp32 weights are exact in neither fp16 nor bf16."""
    worker = fsdp_worker("policy", checkpoint, dtype, *overrides)
    for seed in range(2):
        worker.forward_backward(batch(seed))
        worker.optim_step()
    return worker


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "grouped"), [(torch.float16, False), (torch.bfloat16, True)], ids=str
)
def test_fsdps_weights_are_rounded_once(
    cpu: None, checkpoints: dict[str, Path], shim: Any, dtype: torch.dtype, grouped: bool
) -> None:
    """The shim leaves SkyRL's own stream of weights unchanged."""
    worker = trained(checkpoints["float32"])
    expected = weights_rounded_once(worker, dtype)
    off = weights_sent(worker, dtype, grouped=grouped)
    shim(export=False)
    on = weights_sent(worker, dtype, grouped=grouped)
    assert equal_streams(off, expected)
    assert equal_streams(on, expected)
    if dtype is torch.float16:
        exact = [one.to(torch.bfloat16).to(one.dtype).eq(one).float().mean() for one in on.values()]
        assert min(exact) < 0.9, "a stream that went through bf16 would be exact"


# -- the delta sync ------------------------------------------------------------------------------

DELTA = (
    "generator.inference_engine.weight_sync_backend=delta",
    "generator.inference_engine.delta_weight_sync.sync_dir=/nowhere",
    "trainer.placement.colocate_all=false",
)


def received(base: Path, weights: dict[str, torch.Tensor], dtype: torch.dtype, folder: Path) -> Any:
    """The weights that SkyRL's receiver has after SkyRL's sender has published once."""
    from skyrl.backends.skyrl_train.weight_sync.delta.checkpoint import (
        CheckpointIndex,
        DeltaCheckpointPublisher,
        LocalCheckpointStore,
    )
    from skyrl.backends.skyrl_train.weight_sync.sources import FsdpWeightSource

    model = torch.nn.Module()
    model.state_dict = lambda: weights  # type: ignore[method-assign,assignment]
    sender = DeltaCheckpointPublisher(str(base), str(folder / "sync"), str(folder / "stage"))
    info = sender.publish(sender.create_delta_files(FsdpWeightSource(model, dtype)))
    store = LocalCheckpointStore(str(base), str(folder / "local"))
    store.fetch(info["target_version"], info["sync_dir"], info["uri"])
    return dict(CheckpointIndex(store._current_checkpoint_dir()).iter_tensors())


@pytest.mark.slow
@since_0_4
@pytest.mark.parametrize(
    ("stored", "dtype"),
    [("bfloat16", torch.float16), ("float32", torch.float16), ("float16", torch.bfloat16)],
    ids=str,
)
def test_the_delta_sync(
    checkpoints: dict[str, Path], shim: Any, tmp_path: Path, stored: str, dtype: torch.dtype
) -> None:
    """The delta sync rounds to the base checkpoint's dtype, and the driver warns of it."""
    from safetensors.torch import load_file

    base = checkpoints[stored]
    torch.manual_seed(0)
    weights = {
        name: one.float() + torch.randn(one.shape) * 1e-3
        for name, one in load_file(base / "model.safetensors").items()
    }
    half = dtype is torch.float16
    words = (*on_fsdp("fp16" if half else "bf16", NO_REF, *DELTA), f"{KEY}={name_of(dtype)}")
    shim(export=False)
    config, messages = both.watched(lambda: validated(*words, *_model(base)))
    assert engine_dtype(config) == name_of_torch(dtype)
    assert planned(*words, *_model(base)) == (messages, notes_of_decisions())
    precision_shim.uninstall()
    shim(export=False)
    found, in_worker = both.watched(lambda: received(base, weights, dtype, tmp_path))
    assert in_worker == messages
    once = {name: one.to(dtype) for name, one in weights.items()}
    arrived = {name: found[name].to(dtype) for name in weights}
    exact = all(torch.equal(arrived[name], one) for name, one in once.items())
    assert exact == (stored in ("float32", name_of_torch(dtype)))
    assert len(messages) == (half and not exact)
    if messages:
        assert "the delta sync sends the dtype of the base checkpoint, bf16" in messages[0]
        assert "weight_sync_backend=nccl" in messages[0]
    elif not exact:
        line = "weights go out in fp16, and the rollout computes in bf16"
        assert any(line in one for one in notes_of_decisions())


def name_of_torch(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@since_0_4
def test_the_delta_sync_under_strict(
    checkpoints: dict[str, Path], shim: Any, tmp_path: Path
) -> None:
    """The driver raises the error, because other ranks would wait for a worker that raised."""
    shim(strict=True, export=False)
    words = (*on_fsdp("fp16", NO_REF, *DELTA), f"{KEY}=fp16")
    with pytest.raises(UnsupportedPrecisionError, match="the delta sync sends"):
        validated(*words, *_model(checkpoints["bfloat16"]))
    validated(*words, *_model(tmp_path))
    from safetensors.torch import load_file

    weights = load_file(checkpoints["bfloat16"] / "model.safetensors")
    _, messages = both.watched(
        lambda: received(checkpoints["bfloat16"], weights, torch.float16, tmp_path)
    )
    assert len(messages) == 1


@pytest.mark.parametrize(
    ("words", "rounded"),
    [
        ((f"{OVER}.kv_cache_dtype=fp8",), "fp8 KV cache"),
        ((f"{OVER}.quantization=bitsandbytes",), "bitsandbytes weights"),
        ((f"{OVER}.kv_cache_dtype=bfloat16",), ""),
        ((f"{OVER}.kv_cache_dtype=null", f"{OVER}.quantization=null"), ""),
    ],
)
def test_what_the_engine_keeps_in_fewer_bits(
    shim: Any, words: tuple[str, ...], rounded: str
) -> None:
    from skyrl.backends.skyrl_train.inference_servers.utils import build_vllm_cli_args

    shim()
    line = on_fsdp("bf16", NO_REF, *words)
    made = vars(build_vllm_cli_args(validated(*line)))
    for word in words:
        key, _, value = word.partition("=")
        assert str(made[key.rpartition(".")[2]]) == {"null": "None"}.get(value, value)
    with_it = f"bf16 with {rounded} beside the policy's bf16"
    assert told() == {"rollout": with_it if rounded else "bf16, as the policy"}
    assert planned(*line) == ([], notes_of_decisions())
