"""MegatronEngine of the installed verl: the precision in its live objects."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

import precision_shim
from precision_shim.errors import DtypeError, PrecisionShimWarning, UnsupportedPrecisionError

from ..every_framework.walks import walking
from ..stand_ins.optimizer_states import dtypes_after_step
from .conftest import VERL
from .support import engine, optim_config

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HAS_FIELDS = Version("0.9") <= VERL
"""Whether verl's own config has the opt-in fields; then ``auto`` follows the config."""

pytestmark = [
    pytest.mark.skipif(
        Version("0.7") > VERL, reason="verl 0.6's engine: covered whole by test_untested_version"
    )
]

PATHS = [
    pytest.param(False, id="mbridge"),
    pytest.param(
        True,
        id="bridge-provider",
        marks=pytest.mark.skipif(
            find_spec("megatron") is None or find_spec("megatron.bridge") is None,
            reason="Megatron-Bridge is not installed in this environment",
        ),
    ),
]


@pytest.fixture
def build(fused_adam: str, checkpoint: Path, value_checkpoint: Path) -> Callable[..., Any]:
    """Build and initialize a real engine of an actor or critic."""

    def make(dtype: str = "bfloat16", *, critic: bool = False, **options: Any) -> Any:
        by_architecture = critic and Version("0.8") > VERL
        made = engine(
            value_checkpoint if by_architecture else checkpoint, dtype, critic=critic, **options
        )
        made.initialize()
        return made

    return make


def bucket(built: Any) -> torch.dtype:
    (found,) = {buffer.grad_data.dtype for chunk in built.module for buffer in chunk.buffers}
    return found


def states(built: Any) -> dict[str, torch.dtype]:
    return dtypes_after_step(built.module, built.optimizer)


@pytest.mark.skipif(Version("0.9.1") != VERL, reason="the walk is that of verl 0.9.1")
def test_the_walk_of_a_dtype_name(build: Any, shim: Any) -> None:
    """Of a second engine: what the first one imports is no part of the walk."""
    shim(features="dtype-coercion,bf16-dispatch,grad-bucket-alignment,fp16-scaling")
    asked = {"exp_avg_dtype": "bf16", "use_precision_aware_optimizer": True}
    optim = optim_config(override_optimizer_config=asked)
    build(optim=optim)
    with walking("A dtype name"):
        built = build(optim=optim)
    assert states(built)["exp_avg"] is BF16


def reasons(feature: str) -> str:
    """The shim's decisions on a feature, as one text."""
    return "\n".join(str(d) for d in precision_shim.status().decisions if d.feature == feature)


# -- the dispatch table, live ----------------------------------------------------------------


@pytest.mark.parametrize("bridge", PATHS)
@pytest.mark.parametrize(("critic", "dtype"), [(False, BF16), (True, FP16)])
def test_table_in_live_objects(
    build: Any, shim: Any, bridge: bool, critic: bool, dtype: torch.dtype
) -> None:
    if Version("0.9.0") == VERL and critic and not bridge:
        pytest.skip("verl 0.9.0 cannot build a critic through mbridge (TypeError of its own)")
    if Version("0.8") > VERL and critic and bridge:
        pytest.skip("Megatron-Bridge 0.3 knows no architecture by which verl 0.7 tells a critic")
    shim(settings={"optimizer_states": "follow-model"})
    built = build(
        str(dtype).removeprefix("torch."),
        critic=critic,
        bridge=bridge,
        optim=optim_config(override_optimizer_config={"adam_beta2": 0.95}),
    )
    config = built.optimizer.config
    assert config.use_precision_aware_optimizer
    assert config.params_dtype is dtype
    assert (config.bf16, config.fp16) == (dtype is BF16, dtype is FP16)
    low = BF16 if dtype is BF16 else FP32
    assert bucket(built) is low
    assert config.main_grads_dtype is low
    assert config.main_params_dtype is FP32
    if dtype is FP16:
        assert (config.initial_loss_scale, config.min_loss_scale) == (32768, 1)
        assert config.store_param_remainders is False
    live = states(built)
    assert (live["exp_avg"], live["exp_avg_sq"]) == (low, low)
    subject = "critic" if critic else "actor"
    assert f"verl {subject}: bf16-dispatch" in reasons("bf16-dispatch")
    assert f"verl {subject}: grad-bucket" in reasons("grad-bucket-alignment")


@pytest.mark.parametrize("bridge", PATHS)
def test_fp32_model_gets_an_fp32_optimizer(build: Any, shim: Any, bridge: bool) -> None:
    """An fp32 model gets an fp32 optimizer also before 0.9, where verl would set bf16."""
    shim(settings={"optimizer_states": "follow-model" if bridge else "auto"})
    built = build("float32", bridge=bridge)
    config = built.optimizer.config
    assert {p.dtype for chunk in built.module for p in chunk.parameters()} == {FP32}
    assert bucket(built) is FP32
    assert (config.bf16, config.fp16, config.params_dtype) == (False, False, FP32)
    assert not config.use_precision_aware_optimizer
    assert states(built)["exp_avg"] is FP32


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_auto(build: Any, shim: Any, dtype: str) -> None:
    """Before 0.9 ``auto`` follows the model with the guard; from 0.9 on it follows the config."""
    shim()
    built = build(dtype)
    follows = dtype == "bfloat16" and not HAS_FIELDS
    assert bucket(built) is (BF16 if follows else FP32)
    live = states(built)
    assert live["exp_avg"] is (BF16 if follows else FP32)
    assert live["exp_avg_sq"] is FP32, "Megatron's beta2 of 0.999 does not let a bf16 one decay"
    if follows:
        assert "cannot decay" in reasons("bf16-dispatch")


def test_opt_in_fields_work_on_every_version(build: Any, shim: Any) -> None:
    shim(settings={"optimizer_states": "as-configured"})
    built = build(
        optim=optim_config(
            use_precision_aware_optimizer=True,
            main_grads_dtype="BF16",
            exp_avg_dtype="torch.bfloat16",
            exp_avg_sq_dtype="fp32",
        )
    )
    assert bucket(built) is BF16
    live = states(built)
    assert (live["exp_avg"], live["exp_avg_sq"]) == (BF16, FP32)


def test_models_in_one_process_differ(build: Any, shim: Any) -> None:
    shim(settings={"optimizer_states": "follow-model"})
    optim = optim_config(override_optimizer_config={"adam_beta2": 0.95})
    actor = build("bfloat16", optim=optim)
    reference = build("bfloat16", forward_only=True)
    critic = build("float16", critic=True, optim=optim, bridge=Version("0.9.0") == VERL)
    again = build("bfloat16", optim=optim)
    assert [bucket(actor), bucket(critic), bucket(again)] == [BF16, FP32, BF16]
    assert reference.optimizer is None


# -- a value that the user wrote wins --------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("in_fp32", [True, False])
def test_users_bucket_is_never_overridden(
    build: Any, shim: Any, dtype: torch.dtype, in_fp32: bool
) -> None:
    shim(settings={"optimizer_states": "follow-model"})
    consistent = in_fp32 == (dtype is FP16)
    options = {
        "ddp": {"grad_reduce_in_fp32": in_fp32},
        "optim": optim_config(override_optimizer_config={"adam_beta2": 0.95}),
    }
    name = str(dtype).removeprefix("torch.")
    if consistent:
        built = build(name, **options)
    else:
        with pytest.warns(PrecisionShimWarning, match="grad_reduce_in_fp32"):
            built = build(name, **options)
    assert bucket(built) is (FP32 if in_fp32 else dtype)
    # A precision-aware optimizer cannot clip fp16 gradients, so the shim does not add one.
    aware = built.optimizer.config.use_precision_aware_optimizer
    assert aware is (in_fp32 or dtype is not FP16)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"exp_avg_dtype": "fp32"}, {"exp_avg_dtype": FP32, "exp_avg_sq_dtype": BF16}),
        ({"exp_avg_sq_dtype": "half"}, {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": FP16}),
        ({"main_grads_dtype": "fp32"}, {"main_grads_dtype": FP32, "exp_avg_dtype": BF16}),
        ({"exp_avg_dtype": "fp8"}, {"exp_avg_dtype": torch.uint8}),
        ({"store_param_remainders": False}, {"store_param_remainders": False}),
        (
            {"use_precision_aware_optimizer": False},
            {"use_precision_aware_optimizer": False, "exp_avg_dtype": FP32},
        ),
        ({"loss_scale": 1024.0}, {"loss_scale": 1024.0, "exp_avg_dtype": BF16}),
    ],
    ids=",".join,
)
def test_overrides_win_field_by_field(
    build: Any, shim: Any, overrides: dict[str, Any], expected: dict[str, Any]
) -> None:
    shim(settings={"optimizer_states": "follow-model"})
    given = {"adam_beta2": 0.95, **overrides}
    optim = optim_config(override_optimizer_config=given)
    built = build(optim=optim)
    config = built.optimizer.config
    assert {key: getattr(config, key) for key in expected} == expected
    low = config.use_precision_aware_optimizer and config.main_grads_dtype is BF16
    assert bucket(built) is (BF16 if low else FP32)
    assert optim.override_optimizer_config == {"adam_beta2": 0.95, **overrides}, "caller's config"


@pytest.mark.skipif(HAS_FIELDS, reason="from 0.9 the fields cannot be told from their defaults")
@pytest.mark.parametrize(
    ("fields", "first", "second"),
    [
        ({"use_precision_aware_optimizer": False}, FP32, FP32),
        ({"exp_avg_dtype": "fp32"}, FP32, BF16),
        ({"exp_avg_sq_dtype": "fp32"}, BF16, FP32),
        ({"use_precision_aware_optimizer": True, "exp_avg_sq_dtype": "fp32"}, BF16, FP32),
    ],
    ids=str,
)
def test_fields_that_this_version_lacks_are_the_users_when_written(
    build: Any, shim: Any, fields: dict[str, Any], first: torch.dtype, second: torch.dtype
) -> None:
    shim()
    optim = optim_config(override_optimizer_config={"adam_beta2": 0.95}, **fields)
    live = states(build(optim=optim))
    assert (live["exp_avg"], live["exp_avg_sq"]) == (first, second)


@pytest.mark.parametrize(
    ("config", "optim", "reason"),
    [
        ({"use_megatron_fsdp": True}, {}, "Megatron-FSDP"),
        ({}, {"use_layer_wise_distributed_optimizer": True}, "layer-wise"),
    ],
    ids=["megatron-fsdp", "layer-wise-muon"],
)
def test_blockers_are_read_from_verls_config(
    cpu: None, checkpoint: Path, config: dict[str, Any], optim: dict[str, Any], reason: str
) -> None:
    """The shim reads two options from verl's configs; a CPU cannot run these options."""
    from inspect import signature

    from verl.workers.config import McoreEngineConfig, McoreOptimizerConfig

    from precision_shim.adapting import around
    from precision_shim_adapters.megatron import current_build
    from precision_shim_adapters.verl.training.megatron import engine_build

    known = {
        **signature(McoreEngineConfig).parameters,
        **signature(McoreOptimizerConfig).parameters,
    }
    if not {*config, *optim} <= known.keys():
        pytest.skip(f"verl {VERL} has no {', '.join({*config, *optim} - known.keys())}")
    made = engine(checkpoint, "bfloat16", optim=optim_config(**optim), **config)
    seen: list[Any] = []
    around(engine_build, lambda: seen.append(current_build()), made, (), {})
    assert reason in " ".join(seen[0].requested.blockers)


@pytest.mark.skipif(not HAS_FIELDS, reason="verl has the fields only from 0.9")
def test_fp16_engine_with_bf16_fields(build: Any, shim: Any) -> None:
    shim()
    optim = optim_config(use_precision_aware_optimizer=True, main_grads_dtype="bf16")
    with pytest.warns(PrecisionShimWarning, match="optim.main_grads_dtype=bf16 has no effect"):
        built = build("float16", optim=optim)
    assert bucket(built) is FP32, "an fp16 bucket ends in an AssertionError while clipping"
    states(built)


# -- where the precision-aware optimizer cannot run ------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_without_transformer_engine(cpu: None, shim: Any, checkpoint: Path, dtype: str) -> None:
    shim(settings={"optimizer_states": "follow-model"})
    built = engine(checkpoint, dtype)
    built.initialize()
    assert not built.optimizer.config.use_precision_aware_optimizer
    assert bucket(built) is FP32
    assert "TransformerEngine is not installed" in reasons("bf16-dispatch")


def test_what_the_user_asked_for_fails_by_name(cpu: None, shim: Any, checkpoint: Path) -> None:
    shim()
    asked = optim_config(override_optimizer_config={"use_precision_aware_optimizer": True})
    with pytest.raises(UnsupportedPrecisionError, match="TransformerEngine is not installed"):
        engine(checkpoint, "bfloat16", optim=asked).initialize()


# -- dtype names ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("exp_avg_dtype", "bf17", "fp32/float32"),
        ("main_params_dtype", "bf16", "fp32, fp16"),
        ("main_grads_dtype", "fp16", "fp32, bf16"),
        ("exp_avg_sq_dtype", torch.float64, "fp32, bf16, fp16, fp8"),
    ],
)
def test_bad_dtypes_fail_before_the_optimizer(
    build: Any, shim: Any, key: str, value: Any, allowed: str
) -> None:
    shim()
    with pytest.raises(DtypeError, match=key) as caught:
        build(optim=optim_config(override_optimizer_config={key: value}))
    assert isinstance(caught.value, ValueError)
    assert allowed in str(caught.value)
    assert f"verl {VERL}" in str(caught.value)
