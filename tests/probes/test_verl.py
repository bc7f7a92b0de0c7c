"""What the shim assumes of verl."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from precision_shim.adapting import look
from precision_shim_adapters.megatron.policy.optimizer_plan import ROWS
from precision_shim_tools.testing import megatron_on_cpu, model_parallel, tiny_gpt

from .test_megatron import BF16, FP16, FP32, fused_adam

ENGINE = "verl.workers.engine.megatron.transformer_impl"
OPT_IN = {
    "use_precision_aware_optimizer": True,
    "main_grads_dtype": "bf16",
    "exp_avg_dtype": "bf16",
    "exp_avg_sq_dtype": "fp32",
}


def make_config(fields: dict[str, Any] | None = None, **flags: bool) -> Any:
    """The OptimizerConfig that verl makes from its own config."""
    from omegaconf import OmegaConf
    from verl.utils.megatron.optimizer import init_megatron_optim_config

    own = {"optimizer": "adam", "lr": 1e-3, "min_lr": 0.0, "clip_grad": 1.0, "weight_decay": 0.0}
    with fused_adam():
        return init_megatron_optim_config(OmegaConf.create({**own, **(fields or {})}), **flags)


def test_the_megatron_engine_raises_on_an_overflow() -> None:
    """The shim reports a skipped step to verl as a successful step with grad norm NaN."""
    from verl.workers.engine.megatron.transformer_impl import MegatronEngine

    engine = SimpleNamespace(optimizer=SimpleNamespace(step=lambda: (False, None, None)))
    with pytest.raises(NotImplementedError):
        MegatronEngine.optimizer_step(engine)


def test_the_fp16_row() -> None:
    """The shim relies on verl to set the OptimizerConfig fields that an fp16 model needs."""
    made, row = make_config(fp16=True), ROWS[FP16]
    assert {name: getattr(made, name) for name in row} == dict(row)


def test_overrides_go_over_all_else_as_they_are_written() -> None:
    """The shim puts its values into ``override_optimizer_config``, with dtype names coerced."""
    written = {"initial_loss_scale": 8.0, "exp_avg_dtype": "bf16"}
    made = make_config({"override_optimizer_config": written}, fp16=True)
    assert {name: getattr(made, name) for name in written} == written


def test_the_opt_in() -> None:
    """If verl itself sets the optimizer states' dtypes, the shim does not change the config."""
    from verl.utils.megatron.optimizer import init_megatron_optim_config

    made = make_config(OPT_IN)
    found = [getattr(made, name) for name in OPT_IN]
    if "bf16" not in inspect.signature(init_megatron_optim_config).parameters:
        assert found == [False, FP32, FP32, FP32]
        return
    assert found == [True, BF16, BF16, FP32]
    plain = make_config(bf16=False)
    assert (plain.bf16, plain.params_dtype) == (False, FP32)


def test_which_buckets_verl_aligns_itself() -> None:
    """If verl does not set the bucket's dtype, the shim gives the bucket the main grads' dtype.

    verl sets it for the bf16 opt-in (0.9.0), for every optimizer config (0.9.1), or not at all.
    """
    from omegaconf import OmegaConf
    from verl.workers.engine.megatron.transformer_impl import MegatronEngine

    symbol = look(f"{ENGINE}:MegatronEngine._resolve_override_ddp_config")
    key = "grad_reduce_in_fp32"
    if not symbol.found:
        assert key not in look(f"{ENGINE}:MegatronEngine._build_megatron_module").names
        return
    found = []
    for written, fields in (({}, {}), ({}, OPT_IN), ({key: True}, OPT_IN)):
        engine = SimpleNamespace(
            engine_config=SimpleNamespace(override_ddp_config=written),
            optimizer_config=OmegaConf.create({"optimizer": "adam", **fields}),
        )
        found.append(MegatronEngine._resolve_override_ddp_config(engine).get(key))
    for_all = "use_low_precision_main_grads" in symbol.names
    assert found == [True if for_all else None, False, True]


def test_verls_own_bucket_is_fp32() -> None:
    """verl's bucket is fp32 unless the user wrote another dtype."""
    from megatron.core.enums import ModelType
    from verl.utils import megatron_utils

    # verl before 0.9 reads a member of ModelType that megatron-core 0.17 removed.
    kinds = SimpleNamespace(
        encoder_or_decoder=ModelType.encoder_or_decoder, encoder_and_decoder=object()
    )
    provider: Any = tiny_gpt(BF16)
    with pytest.MonkeyPatch.context() as patch, megatron_on_cpu(), model_parallel():
        patch.setattr(megatron_utils, "ModelType", kinds)
        for override, dtype in ((None, FP32), ({"grad_reduce_in_fp32": False}, BF16)):
            (chunk,) = megatron_utils.get_model(
                provider, transformer_config=provider.config, override_ddp_config=override
            )
            assert chunk.buffers[0].grad_data.dtype is dtype


class Calls:
    """A fake scaler that lists which of its methods verl calls."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.names.append(name)


def test_the_fsdp_engine_takes_no_step_on_an_infinite_norm() -> None:
    """verl 0.8 steps with the shim's scaler; verl 0.7 itself skips a step with infinite norm."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    symbol = look("verl.workers.engine.fsdp.transformer_impl:FSDPEngine.optimizer_step")
    for scaler in (None, Calls()):
        layer = torch.nn.Linear(1, 1)
        torch.nn.init.ones_(layer.weight)
        layer.weight.grad = torch.full_like(layer.weight, float("inf"))
        engine = SimpleNamespace(
            optimizer_config=SimpleNamespace(clip_grad=1.0),
            module=layer,
            optimizer=torch.optim.SGD([layer.weight], lr=1.0),
            scaler=scaler,
            _qat_enabled=False,
        )
        assert FSDPEngine.optimizer_step(engine) == float("inf")
        assert layer.weight.item() == 1.0
        if scaler is not None:
            scales = "scaler" in symbol.names
            assert scaler.names == (["unscale_", "step", "update"] if scales else [])
