"""What the shim assumes of Megatron-core and Megatron-Bridge."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from precision_shim.errors import InconsistentPrecisionError
from precision_shim_adapters import megatron
from precision_shim_adapters.megatron.policy.optimizer_plan import MEGATRON_BETA2
from precision_shim_tools.testing import (
    cuda_means_cpu,
    megatron_on_cpu,
    model_parallel,
    stand_in_transformer_engine,
    tiny_gpt,
)
from precision_shim_tools.testing.transformer_engine import real_transformer_engine

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@contextmanager
def fused_adam() -> Iterator[None]:
    """Provide TransformerEngine, or its stand-in if TransformerEngine is not installed."""
    with nullcontext() if real_transformer_engine() else stand_in_transformer_engine():
        yield


def make_config(**fields: Any) -> Any:
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    with fused_adam():
        return OptimizerConfig(**fields)


def refusal(**fields: Any) -> str:
    """Megatron's message that it does not take a config; empty if Megatron takes it."""
    try:
        make_config(**fields)
    except (AssertionError, ValueError) as error:
        return str(error).replace("_", " ")
    return ""


def test_the_precision_aware_optimizer_needs_the_distributed_optimizer() -> None:
    """The shim keeps fp32 states if the distributed optimizer is off."""
    assert "distributed optimizer" in refusal(
        optimizer="adam", use_precision_aware_optimizer=True, use_distributed_optimizer=False
    )


def test_the_precision_aware_optimizer_needs_adam() -> None:
    """The shim keeps fp32 states if the optimizer is not adam."""
    assert "adam" in refusal(
        optimizer="sgd", use_precision_aware_optimizer=True, use_distributed_optimizer=True
    )


def test_low_precision_states_need_the_precision_aware_optimizer() -> None:
    """The shim writes ``use_precision_aware_optimizer=False`` only if all states are fp32."""
    for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        dtype = FP16 if name == "main_params_dtype" else BF16
        assert name.replace("_", " ") in refusal(**{name: dtype})


def test_masters_are_megatrons_with_other_fp8_recipes_than_delayed() -> None:
    """The shim keeps fp32 states if the fp8 recipe is not ``delayed``."""
    for recipe, in_fused_adam in (("delayed", True), ("tensorwise", False)):
        made = make_config(
            use_precision_aware_optimizer=True, use_distributed_optimizer=True, fp8_recipe=recipe
        )
        assert made.use_precision_aware_optimizer_no_fp8_or_ds_fp8 is in_fused_adam


def test_megatrons_defaults() -> None:
    """The shim relies on Megatron's default beta2 and on the defaults of fields that it omits."""
    from megatron.core.distributed.distributed_data_parallel_config import (
        DistributedDataParallelConfig,
    )

    made, bucket = make_config(), DistributedDataParallelConfig()
    assert made.adam_beta2 == MEGATRON_BETA2
    assert made.main_params_dtype is made.exp_avg_dtype is made.exp_avg_sq_dtype is FP32
    assert made.store_param_remainders is True
    assert made.use_precision_aware_optimizer is False
    assert made.loss_scale is None
    assert bucket.grad_reduce_in_fp32 is False
    assert bucket.check_for_nan_in_grad is False


def test_an_overflow_is_an_answer_and_no_exception() -> None:
    """The shim replaces ``(False, None, None)``, which Megatron returns for an overflow."""
    from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

    steps: list[str] = []
    optimizer = SimpleNamespace(
        config=make_config(),
        prepare_grads=lambda: True,
        step_with_ready_grads=lambda: steps.append("step"),
    )
    assert MixedPrecisionOptimizer.step(optimizer) == (False, None, None)
    assert not steps


def test_megatrons_scaler() -> None:
    """The shim reads the scale from the device only after Megatron replaced the scale's tensor."""
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    with cuda_means_cpu():
        scaler = DynamicGradScaler(8.0, 4.0, 2.0, 0.5, 2, 2)
        before = scaler.scale
        scales = []
        for step in "-xxx-x--x----x-":  # x: an overflow
            scaler.update(step == "x")
            scales.append(float(scaler.scale))
    assert scales == [8, 8, 4, 4, 4, 4, 4, 8, 8, 8, 16, 16, 32, 32, 32]
    assert scaler.scale is not before
    assert float(before) == 8.0
    saved = {name: float(value) for name, value in scaler.state_dict().items()}
    assert saved == {"scale": 32.0, "growth_tracker": 1.0, "hysteresis_tracker": 1.0}


def test_remainders_have_the_masters_name() -> None:
    """The shim writes fp32 master weights, not remainders, as the state ``param``."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    parameter = torch.nn.Parameter(torch.zeros(2, dtype=BF16))
    states = {"master_param": torch.zeros(2, dtype=torch.int16), "exp_avg": torch.zeros(2)}
    inner = SimpleNamespace(
        param_groups=[{"params": [parameter]}],
        state={parameter: states},
        get_unscaled_state=lambda one, name: states[name],
    )
    optimizer = SimpleNamespace(
        model_param_group_index_map={parameter: (0, 0)},
        config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=True),
        optimizer=inner,
    )
    found = DistributedOptimizer._get_main_param_and_optimizer_states(optimizer, parameter)
    dtypes = {name: value.dtype for name, value in found.items()}
    assert dtypes == {"exp_avg": FP32, "param": torch.int16}


@contextmanager
def make_chunk(**ddp: Any) -> Iterator[Any]:
    """Megatron's DDP around a bf16 layer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    with megatron_on_cpu(), model_parallel():
        config = TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True
        )
        layer: Any = torch.nn.Linear(8, 8).bfloat16()
        layer.config = config
        yield DistributedDataParallel(
            config=config, ddp_config=DistributedDataParallelConfig(**ddp), module=layer
        )


def test_ddps_check_of_gradients_ends_the_job() -> None:
    """The shim turns off the DDP's check of gradients if a dynamic scaler skips overflows."""
    for checks in (True, False):
        with make_chunk(check_for_nan_in_grad=checks) as chunk:
            chunk.buffers[0].grad_data.fill_(float("inf"))
            with pytest.raises(Exception, match="grad") if checks else nullcontext():
                chunk.finish_grad_sync()


def test_main_grads_dtype_is_only_a_name() -> None:
    """The bucket gets ``main_grads_dtype``; checkpoint keys stay those of an unpatched job."""
    from megatron.core.optimizer import get_megatron_optimizer

    for in_fp32, asked in ((True, BF16), (False, FP32)):
        real = FP32 if in_fp32 else BF16
        config = make_config(
            optimizer="adam",
            lr=1e-3,
            bf16=True,
            params_dtype=BF16,
            use_precision_aware_optimizer=True,
            use_distributed_optimizer=True,
            main_grads_dtype=asked,
        )
        with (
            fused_adam(),
            make_chunk(grad_reduce_in_fp32=in_fp32, use_distributed_optimizer=True) as chunk,
        ):
            made = get_megatron_optimizer(config, [chunk])
            (inner,) = getattr(made, "chained_optimizers", [made])
            inner._copy_model_grads_to_main_grads()
            parameter = inner.optimizer.param_groups[0]["params"][0]
            assert parameter.decoupled_grad.dtype is real
            assert [list(ranges) for ranges in inner.gbuf_ranges] == [[(BF16, real)]]


@pytest.mark.parametrize(
    ("fields", "gather"),
    [
        ({}, True),
        ({}, False),
        ({"use_precision_aware_optimizer": True}, True),
        ({"use_precision_aware_optimizer": True, "fp8_recipe": "blockwise"}, False),
    ],
    ids=str,
)
def test_fp8_parameters_are_refused_where_megatron_cannot_train_them(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], gather: bool
) -> None:
    """Without masters Megatron's optimizer cannot be made; masters may never be written back."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import distrib_optimizer, get_megatron_optimizer

    written: list[Any] = []
    monkeypatch.setattr(distrib_optimizer, "is_float8tensor", lambda p: hasattr(p, "_fp8_dtype"))
    monkeypatch.setattr(distrib_optimizer, "quantize_param_shard", lambda p, *_: written.extend(p))
    config = make_config(
        optimizer="adam",
        lr=1e-3,
        bf16=True,
        params_dtype=BF16,
        use_distributed_optimizer=True,
        **fields,
    )
    ddp = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": True}
    if hasattr(DistributedDataParallelConfig(), "fp8_param_gather"):
        ddp["fp8_param_gather"] = gather
    with fused_adam(), make_chunk(**ddp) as chunk:
        chunk.module.weight._fp8_dtype = "e4m3"
        try:
            megatron.check("verl", config, [chunk])
            refusal = ""
        except InconsistentPrecisionError as error:
            refusal = str(error)
        try:
            made = get_megatron_optimizer(config, [chunk])
            (inner,) = getattr(made, "chained_optimizers", [made])
            inner._copy_model_grads_to_main_grads()
        except (TypeError, AttributeError):  # the parameter's shard and master are None
            assert "makes no masters" in refusal
            return
        inner._copy_main_params_to_model_params()
    assert ("never writes" in refusal) is (written == [])


def test_fp16_gradients_are_not_clipped() -> None:
    """When the optimizer is built, the shim raises an error if fp16 gradients would be clipped."""
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    for dtype in (FP32, BF16, FP16):
        parameter: Any = torch.nn.Parameter(torch.zeros(2))
        parameter.decoupled_grad = torch.ones(2, dtype=dtype)
        with megatron_on_cpu(), pytest.raises(AssertionError) if dtype is FP16 else nullcontext():
            clip_grad_by_total_norm_fp32([parameter], 1.0, 0.5, use_decoupled_grad=True)


def test_megatron_bridge_leaves_the_bucket_and_the_checks_to_megatron() -> None:
    """Megatron-Bridge needs no seam: the bucket has the model's dtype, Megatron checks configs."""
    module = pytest.importorskip("megatron.bridge.training.config")

    def finalized() -> None:
        made = module.OptimizerConfig(exp_avg_dtype=BF16)
        getattr(made, "finalize", lambda: None)()

    with fused_adam(), pytest.raises(AssertionError):
        finalized()
    assert module.DistributedDataParallelConfig().grad_reduce_in_fp32 is False


def test_fp32_parameters_beside_bf16_ones_get_the_same_moments() -> None:
    """The shim keeps fp32 states for parameters of several dtypes: FusedAdam has one for all."""
    made = tiny_gpt(BF16)
    with megatron_on_cpu(), model_parallel(), fused_adam():
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        model = Float16Module(made.config, made())  # type: ignore[attr-defined]
        for module in model.modules():
            if "Norm" in type(module).__name__:
                module.float()
        buckets = DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=False
        )
        chunk = DistributedDataParallel(made.config, buckets, model)  # type: ignore[attr-defined]
        fields = dict.fromkeys(("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), BF16)
        fields |= {"use_precision_aware_optimizer": True, "use_distributed_optimizer": True}
        config = OptimizerConfig(optimizer="adam", lr=1e-2, bf16=True, params_dtype=BF16, **fields)
        (optimizer,) = get_megatron_optimizer(config, [chunk]).chained_optimizers
        for parameter in chunk.parameters():
            parameter.main_grad.fill_(0.125)
        optimizer.step()
        states = optimizer.optimizer.state
        moments = {(one.dtype, states[one]["exp_avg"].dtype) for one in states}
    assert {(one.param_dtype, one.grad_dtype) for one in chunk.buffers} == {
        (BF16,) * 2,
        (FP32,) * 2,
    }
    assert moments == {(BF16, BF16), (FP32, BF16)}
