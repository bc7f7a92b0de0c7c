"""What the shim assumes of SkyRL."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from precision_shim.adapting import look

OPTIMIZER = "skyrl.backends.skyrl_train.distributed.megatron.optimizer"


def make_config(kwargs: dict[str, Any]) -> Any:
    """The OptimizerConfig that SkyRL makes."""
    from skyrl.backends.skyrl_train.distributed.megatron.optimizer import init_megatron_optim_config

    return init_megatron_optim_config(SimpleNamespace(), kwargs)


def test_the_optimizer_config_is_bf16_beneath_what_the_user_wrote() -> None:
    """The shim adds its values to ``optimizer_config_kwargs``."""
    plain = make_config({})
    assert (plain.bf16, plain.params_dtype) == (True, torch.bfloat16)
    written = make_config({"bf16": False, "params_dtype": torch.float32})
    assert (written.bf16, written.params_dtype) == (False, torch.float32)
    assert plain.use_distributed_optimizer is written.use_distributed_optimizer is True


def test_which_dtype_names_skyrl_coerces() -> None:
    """The shim does not coerce dtype names if SkyRL itself coerces them."""
    if "coerce_optimizer_dtype_kwargs" in look(f"{OPTIMIZER}:init_megatron_optim_config").names:
        assert make_config({"exp_avg_dtype": "fp32"}).exp_avg_dtype is torch.float32
        return
    with pytest.raises(AssertionError):
        make_config({"exp_avg_dtype": "fp32"})


def test_the_defaults() -> None:
    """The shim distinguishes SkyRL's defaults from values that the user wrote."""
    from skyrl.train.config.config import MegatronConfig, MegatronDDPConfig

    assert MegatronDDPConfig().grad_reduce_in_fp32 is True
    assert MegatronConfig().optimizer_config_kwargs["use_precision_aware_optimizer"] is False


def test_a_step_that_megatron_skipped_leaves_no_trace() -> None:
    """The shim reports a skipped step with grad norm NaN and logs it."""
    from skyrl.backends.skyrl_train.distributed.megatron.megatron_strategy import MegatronStrategy

    scheduled: list[int] = []
    optimizer = SimpleNamespace(step=lambda: (False, None, None), zero_grad=lambda: None)
    norm = MegatronStrategy.optimizer_step(
        SimpleNamespace(), optimizer, None, SimpleNamespace(step=scheduled.append)
    )
    assert norm is None
    assert scheduled == [1]


def test_the_fsdp_strategy_takes_no_step_on_an_infinite_norm() -> None:
    """In ``optimizer_step`` the shim's scaler steps the optimizer and counts skipped steps."""
    from skyrl.backends.skyrl_train.distributed.fsdp_strategy import FSDPStrategy

    layer = torch.nn.Linear(1, 1)
    torch.nn.init.ones_(layer.weight)
    layer.weight.grad = torch.full_like(layer.weight, float("inf"))
    scheduled: list[bool] = []
    norm = FSDPStrategy.optimizer_step(
        SimpleNamespace(max_norm=1.0),
        torch.optim.SGD([layer.weight], lr=1.0),
        layer,
        SimpleNamespace(step=lambda: scheduled.append(True)),
    )
    assert norm == float("inf")
    assert layer.weight.item() == 1.0
    assert not scheduled


def test_metrics_are_means() -> None:
    """The shim replaces the mean of a loss scale by the last value."""
    from skyrl.backends.skyrl_train.workers.worker_utils import reduce_metrics

    assert reduce_metrics({"loss_scale": [8.0, 4.0]}) == {"loss_scale": 6.0}
