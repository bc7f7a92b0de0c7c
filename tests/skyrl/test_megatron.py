"""SkyRL's Megatron policy worker: the precision in the objects that ``init_model`` makes."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from packaging.version import Version

import precision_shim
from precision_shim.errors import PrecisionShimWarning
from precision_shim_adapters.skyrl.config import written_bucket
from precision_shim_adapters.skyrl.training.megatron import of_worker

from ..stand_ins.optimizer_states import dtypes_after_step
from .conftest import SKYRL
from .support import build, megatron_worker, train_config

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = {BF16: "bfloat16", FP16: "float16", FP32: "float32"}
KWARGS = "trainer.policy.megatron_config.optimizer_config_kwargs"
BUCKET = "trainer.policy.megatron_config.ddp_config.grad_reduce_in_fp32"
PRECISION_AWARE = f"{KWARGS}.use_precision_aware_optimizer"
OPT_IN = (
    f"{PRECISION_AWARE}=true",
    f"{KWARGS}.main_grads_dtype=bf16",
    f"{KWARGS}.exp_avg_dtype=bf16",
)

MATRIX = [
    # checkpoint, trainer.bf16, the model
    (BF16, True, BF16),
    (BF16, False, FP32),
    (FP32, True, BF16),
    (FP32, False, FP32),
    (FP16, True, BF16),
    (FP16, False, FP16),
]


@pytest.fixture
def make(fused_adam: str, checkpoints: dict[str, Path]) -> Callable[..., Any]:
    """Build a policy worker with its model and optimizer."""

    def worker(dtype: torch.dtype = BF16, *overrides: str, config: Any = None) -> Any:
        return build(checkpoints[NAMES[dtype]], *overrides, config=config)

    return worker


def model_dtype(worker: Any) -> torch.dtype:
    (found,) = {one.dtype for chunk in worker.actor_module for one in chunk.parameters()}
    return found


def bucket(worker: Any) -> torch.dtype:
    (found,) = {buffer.grad_data.dtype for chunk in worker.actor_module for buffer in chunk.buffers}
    return found


def inner(worker: Any) -> Any:
    (found,) = getattr(worker.optimizer, "chained_optimizers", [worker.optimizer])
    return found


def states(worker: Any) -> dict[str, torch.dtype]:
    return dtypes_after_step(worker.actor_module, worker.optimizer)


def reasons(feature: str) -> str:
    return "\n".join(str(d) for d in precision_shim.status().decisions if d.feature == feature)


# -- the dtype matrix ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("checkpoint", "flag", "model"), MATRIX, ids=lambda v: NAMES.get(v, str(v))
)
def test_matrix(
    make: Any, shim: Any, checkpoint: torch.dtype, flag: bool, model: torch.dtype
) -> None:
    """In all six rows the optimizer's config states the live parameters' dtype."""
    shim()
    worker = make(checkpoint, f"trainer.bf16={str(flag).lower()}")
    config = worker.optimizer.config
    assert model_dtype(worker) is model
    assert config.params_dtype is model
    assert (config.bf16, config.fp16) == (model is BF16, model is FP16)
    assert bucket(worker) is FP32
    assert not config.use_precision_aware_optimizer, "auto takes SkyRL's config at its word"
    assert (inner(worker).grad_scaler is not None) == (model is FP16)
    live = states(worker)
    assert (live["exp_avg"], live["exp_avg_sq"]) == (FP32, FP32)
    if model is FP16:
        assert (config.initial_loss_scale, config.min_loss_scale) == (32768, 1)
        assert worker.provider.pipeline_dtype is FP16, "stages would exchange fp32"
    said = f"trainer.bf16={flag}; the checkpoint is {'bf16' if checkpoint is BF16 else 'fp16'}"
    assert (said in reasons("bf16-dispatch")) == (
        (checkpoint, flag) in [(BF16, False), (FP16, True)]
    )


def test_users_transformer_config_wins_over_the_flag(make: Any, shim: Any) -> None:
    shim()
    own = "trainer.policy.megatron_config.transformer_config_kwargs"
    worker = make(BF16, "trainer.bf16=false", f"{own}.fp16=true")
    assert model_dtype(worker) is FP16
    said = reasons("bf16-dispatch")
    assert "model in fp16" in said
    assert "transformer_config_kwargs go over trainer.bf16=False" in said
    assert "model in fp32" not in said
    assert worker.optimizer.config.fp16
    assert inner(worker).grad_scaler is not None


def test_the_reference_model_follows_the_flag_too(
    fused_adam: str, shim: Any, checkpoints: dict[str, Path]
) -> None:
    from skyrl.backends.skyrl_train.workers.megatron.megatron_worker import MegatronWorker

    shim()
    worker = megatron_worker(checkpoints["bfloat16"], "trainer.bf16=false")
    config = worker.cfg.policy.megatron_config
    worker.init_configs(
        str(checkpoints["bfloat16"]), config, {}, config.transformer_config_kwargs, bf16=False
    )
    modules = MegatronWorker.make_megatron_module(
        worker, wrap_with_ddp=False, ddp_config=None, bf16=False
    )
    assert {one.dtype for module in modules for one in module.parameters()} == {FP32}


@pytest.mark.parametrize(
    ("dtype", "release", "override", "named"),
    [
        (FP32, "2.10.0", "trainer.use_sample_packing=true", "need TransformerEngine 2.11"),
        (FP32, "2.11.0", "trainer.use_sample_packing=true", None),
        (FP32, "2.10.0", "trainer.use_sample_packing=false", None),
        (
            FP32,
            "2.11.0",
            "trainer.policy.megatron_config.context_parallel_size=2",
            "context_parallel_size above 1",
        ),
        (BF16, "2.10.0", "trainer.use_sample_packing=true", None),
    ],
)
def test_attention_that_an_fp32_model_has_not(
    cpu: None,
    shim: Any,
    checkpoints: dict[str, Path],
    recwarn: pytest.WarningsRecorder,
    dtype: torch.dtype,
    release: str,
    override: str,
    named: str | None,
) -> None:
    """TransformerEngine's flash and fused attention need 16 bits; unfused attention has limits."""
    from precision_shim_tools.testing.transformer_engine import stand_in_transformer_engine

    if Version("0.3") <= SKYRL:
        override = override.replace("use_sample_packing", "remove_microbatch_padding")
    shim()
    flag = str(dtype is BF16).lower()
    with stand_in_transformer_engine(release):
        worker = megatron_worker(checkpoints["bfloat16"], f"trainer.bf16={flag}", override)
        config = worker.cfg.policy.megatron_config
        worker.init_configs(
            str(checkpoints["bfloat16"]),
            config,
            {},
            config.transformer_config_kwargs,
            bf16=worker.cfg.bf16,
        )
    said = [str(one.message) for one in recwarn if "attention" in str(one.message)]
    assert len(said) == (named is not None)
    assert all(str(named) in text and "the model is fp32" in text for text in said)


# -- the optimizer's states ------------------------------------------------------------------


def test_follow_model(make: Any, shim: Any) -> None:
    shim(settings={"optimizer_states": "follow-model"})
    worker = make(BF16, f"{KWARGS}.adam_beta2=0.95")
    config = worker.optimizer.config
    assert config.use_precision_aware_optimizer, "the default False is no choice of the user's"
    assert bucket(worker) is BF16
    assert config.main_params_dtype is FP32
    live = states(worker)
    assert (live["exp_avg"], live["exp_avg_sq"]) == (BF16, BF16)


@pytest.mark.skipif(Version("0.3") > SKYRL, reason="0.2 has no store of LoRA adapters")
def test_follow_model_gives_way_to_the_store_of_adapters(
    make: Any, shim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SkyRL's adapter store copies fp32 masters, which a precision-aware FusedAdam would hide."""
    from skyrl.backends.skyrl_train.workers.megatron import megatron_worker as module

    init = module.MegatronPolicyWorkerBase.__init__

    def with_store(self: Any, **kwargs: Any) -> None:
        init(self, **kwargs)
        self.adapter_store = module.AdapterStore()

    monkeypatch.setattr(module.MegatronPolicyWorkerBase, "__init__", with_store)
    shim(settings={"optimizer_states": "follow-model"})
    worker = make(BF16, f"{KWARGS}.adam_beta2=0.95")
    assert not worker.optimizer.config.use_precision_aware_optimizer
    assert "LoRA adapters" in reasons("bf16-dispatch")
    worker = make(BF16, f"{KWARGS}.adam_beta2=0.95", f"{PRECISION_AWARE}=true")
    assert worker.optimizer.config.use_precision_aware_optimizer
    assert states(worker)["exp_avg"] is BF16


@pytest.mark.skipif(Version("0.3") > SKYRL, reason="0.2 clips no head by itself")
def test_follow_model_gives_way_to_a_prediction_head(
    cpu: None, checkpoints: dict[str, Path]
) -> None:
    """SkyRL clips the head by its fp32 masters. The tiny checkpoint has no head's weights."""
    heads = "trainer.policy.megatron_config.mtp_num_layers=1"
    worker = megatron_worker(checkpoints["bfloat16"], heads)
    path, config = str(checkpoints["bfloat16"]), worker.cfg.policy.megatron_config
    worker.init_configs(path, config, {}, config.transformer_config_kwargs, enable_mtp=True)
    (blocker,) = of_worker(worker, config.ddp_config).blockers
    assert "a head for multi-token prediction" in blocker


@pytest.mark.skipif(Version("0.3") > SKYRL, reason="SkyRL 0.2 keeps adam_betas from Megatron")
def test_the_guard_knows_skyrls_betas(make: Any, shim: Any) -> None:
    shim(settings={"optimizer_states": "follow-model"})
    betas = "trainer.policy.optimizer_config.adam_betas"
    make(BF16, f"{betas}=[0.9,0.95]")  # no warning
    with pytest.warns(PrecisionShimWarning, match="cannot decay"):
        make(BF16, f"{betas}=[0.9,0.999]")


def test_opt_in_by_names(make: Any, shim: Any) -> None:
    """Optimizer states have the dtypes in the config, and the bucket matches."""
    shim()
    worker = make(BF16, *OPT_IN)
    assert bucket(worker) is BF16
    live = states(worker)
    assert (live["exp_avg"], live["exp_avg_sq"]) == (BF16, FP32)


def test_callers_kwargs_win(make: Any, shim: Any) -> None:
    shim()
    with pytest.warns(PrecisionShimWarning, match="params_dtype=fp32 has no effect"):
        worker = make(BF16, f"{KWARGS}.params_dtype=fp32", f"{KWARGS}.lr=0.5")
    assert worker.optimizer.config.params_dtype is FP32
    assert worker.optimizer.config.lr == 0.5


# -- the bucket ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "expected"), [(None, BF16), ("true", FP32), ("false", BF16)], ids=str
)
def test_bucket_by_what_was_written(
    make: Any, shim: Any, written: str | None, expected: torch.dtype
) -> None:
    """A written True counts as the user's, although it equals the default, even after pickling."""
    shim()
    overrides = [] if written is None else [f"{BUCKET}={written}"]
    config = train_config("trainer.strategy=megatron", *OPT_IN, *overrides)
    config = copy.deepcopy(pickle.loads(cloudpickle.dumps(config)))
    if written == "true":
        with pytest.warns(PrecisionShimWarning, match="grad_reduce_in_fp32"):
            worker = make(BF16, config=config)
    else:
        worker = make(BF16, config=config)
    assert bucket(worker) is expected


@pytest.mark.skipif(Version("0.3") <= SKYRL, reason="SkyRL 0.3 has no old style any more")
@pytest.mark.parametrize("written", [False, True])
def test_overrides_in_the_old_style(
    skyrl: None, shim: Any, written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old-style overrides are merged over a YAML that contains every default.

    SkyRL's wheel lacks the base YAML; an installation from SkyRL's repository has the base YAML.
    """
    import skyrl.train.config.utils as module
    from omegaconf import OmegaConf

    buckets = {
        "megatron_config": {
            "ddp_config": {"grad_reduce_in_fp32": True},
            "optimizer_config_kwargs": {"use_precision_aware_optimizer": False},
        }
    }
    yaml = {"trainer": {"policy": buckets}, "generator": {"backend": "vllm"}}
    monkeypatch.setattr(module, "get_legacy_config", lambda: OmegaConf.create(yaml))
    shim()
    extra = [f"{BUCKET}=true", f"{PRECISION_AWARE}=false"] if written else []
    config = train_config("generator.backend=vllm", "trainer.strategy=megatron", *extra)
    megatron = config.trainer.policy.megatron_config
    name = PRECISION_AWARE.rpartition(".")[2]
    assert isinstance(megatron.optimizer_config_kwargs[name], bool) == written
    assert not megatron.optimizer_config_kwargs[name]
    assert written_bucket(megatron.ddp_config) is (True if written else None)
    assert megatron.ddp_config.grad_reduce_in_fp32 == True  # noqa: E712


@pytest.mark.parametrize("by", ["replace", "asdict"])
@pytest.mark.parametrize("written", [None, True, False])
def test_a_copied_default_stays_a_default(
    skyrl: None, shim: Any, by: str, written: bool | None
) -> None:
    """A copy passes every field, so that a default looks as if the caller had written it."""
    from skyrl.train.config.config import MegatronConfig, MegatronDDPConfig

    def copied(config: Any, **changes: Any) -> Any:
        config = pickle.loads(cloudpickle.dumps(copy.copy(config)))
        if by == "replace":
            return dataclasses.replace(config, **changes)
        return type(config)(**{**dataclasses.asdict(config), **changes})

    shim()
    name, aware = "grad_reduce_in_fp32", PRECISION_AWARE.rpartition(".")[2]
    given = {} if written is None else {name: written}
    ddp = copied(MegatronDDPConfig(**given), overlap_grad_reduce=True)
    assert written_bucket(ddp) is written
    assert ddp == MegatronDDPConfig(**{name: True, **given}, overlap_grad_reduce=True)
    assert written_bucket(copied(ddp, **{name: True})) is True
    kwargs = {} if written is None else {"optimizer_config_kwargs": {aware: written}}
    made = copied(MegatronConfig(**kwargs), tensor_model_parallel_size=2)
    assert isinstance(made.optimizer_config_kwargs[aware], bool) == (written is not None)
    assert made.optimizer_config_kwargs[aware] == bool(written)
