"""Probes that check the shim's assumptions about the installed SkyRL."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from precision_shim.adapting import Answer, look, probe

_TRAIN = "skyrl.backends.skyrl_train"
_OPTIMIZER = f"{_TRAIN}.distributed.megatron.optimizer"
_STRATEGY = f"{_TRAIN}.distributed.megatron.megatron_strategy"
_FSDP = f"{_TRAIN}.distributed.fsdp_strategy"
_CONFIG = "skyrl.train.config.config"


@probe(
    "SkyRL's optimizer config is bf16 beneath what the user wrote",
    assumes="init_megatron_optim_config says bf16 whatever the model is, and merges "
    "optimizer_config_kwargs over its own",
    rule="precision_shim_adapters.skyrl.megatron:configure",
    needs=(_OPTIMIZER,),
)
def optimizer_config() -> Answer:
    """The shim adds its values to ``optimizer_config_kwargs``."""
    from skyrl.backends.skyrl_train.distributed.megatron.optimizer import (
        init_megatron_optim_config,
    )

    plain = init_megatron_optim_config(SimpleNamespace(), {})
    written = init_megatron_optim_config(
        SimpleNamespace(), {"bf16": False, "params_dtype": torch.float32}
    )
    found = [
        (config.bf16, str(config.params_dtype), config.use_distributed_optimizer)
        for config in (plain, written)
    ]
    return Answer([(True, "torch.bfloat16", True), (False, "torch.float32", True)], found)


@probe(
    "which dtype names SkyRL coerces",
    assumes="from 0.3 init_megatron_optim_config turns names into dtypes; before it hands on "
    "strings, which Megatron refuses",
    rule="precision_shim_adapters.skyrl.megatron:native_coercion",
    needs=(_OPTIMIZER,),
)
def coercion() -> Answer:
    """The shim does not coerce dtype names if SkyRL itself coerces them."""
    from skyrl.backends.skyrl_train.distributed.megatron.optimizer import (
        init_megatron_optim_config,
    )

    native = (
        "coerce_optimizer_dtype_kwargs" in look(f"{_OPTIMIZER}:init_megatron_optim_config").names
    )
    try:
        found = str(init_megatron_optim_config(SimpleNamespace(), {"exp_avg_dtype": "fp32"}))
    except AssertionError:
        found = "refused"
    else:
        found = "coerced" if "exp_avg_dtype=torch.float32" in found else found
    return Answer("coerced" if native else "refused", found)


@probe(
    "SkyRL's defaults",
    assumes="a DDP config reduces in fp32, and the optimizer's kwargs have "
    "use_precision_aware_optimizer=False, without the user having written it",
    rule="precision_shim_adapters.skyrl.config",
    needs=(_CONFIG,),
)
def defaults() -> Answer:
    """The shim distinguishes SkyRL's defaults from values that the user wrote."""
    from skyrl.train.config.config import MegatronConfig, MegatronDDPConfig

    kwargs = MegatronConfig().optimizer_config_kwargs
    found = (
        MegatronDDPConfig().grad_reduce_in_fp32,
        kwargs.get("use_precision_aware_optimizer", "no such key"),
    )
    return Answer((True, False), found)


@probe(
    "a step that Megatron skipped leaves no trace",
    assumes="MegatronStrategy.optimizer_step drops what Megatron says of success, returns the norm "
    "None, and the scheduler goes on",
    rule="precision_shim_adapters.skyrl.overflow:step",
    needs=(_STRATEGY,),
)
def overflow() -> Answer:
    """The shim reports a skipped step with grad norm NaN and logs it."""
    from skyrl.backends.skyrl_train.distributed.megatron.megatron_strategy import MegatronStrategy

    scheduled: list[int] = []
    optimizer = SimpleNamespace(step=lambda: (False, None, None), zero_grad=lambda: None)
    norm = MegatronStrategy.optimizer_step(
        SimpleNamespace(), optimizer, None, SimpleNamespace(step=scheduled.append)
    )
    return Answer((None, [1]), (norm, scheduled))


@probe(
    "SkyRL's FSDP strategy and a gradient that is not finite",
    assumes="optimizer_step takes no step, and leaves the scheduler where it is",
    rule="precision_shim_adapters.skyrl.fsdp",
    needs=(_FSDP,),
)
def fsdp_step() -> Answer:
    """In ``optimizer_step`` the shim's scaler steps the optimizer and counts skipped steps."""
    from skyrl.backends.skyrl_train.distributed.fsdp_strategy import FSDPStrategy

    layer = torch.nn.Linear(1, 1)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    layer.weight.grad = torch.full_like(layer.weight, float("inf"))
    scheduled: list[bool] = []
    norm = FSDPStrategy.optimizer_step(
        SimpleNamespace(max_norm=1.0),
        torch.optim.SGD([layer.weight], lr=1.0),
        layer,
        SimpleNamespace(step=lambda: scheduled.append(True)),
    )
    found = (None if norm is None else float(norm), layer.weight.item(), scheduled)
    return Answer((float("inf"), 1.0, []), found)


@probe(
    "SkyRL takes means of metrics",
    assumes="reduce_metrics takes the mean of what has no rule of its own, a loss scale among it",
    rule="precision_shim_adapters.skyrl.overflow:keep_last",
    needs=(f"{_TRAIN}.workers.worker_utils",),
)
def metrics() -> Answer:
    """The shim replaces the mean of a loss scale by the last value."""
    from skyrl.backends.skyrl_train.workers.worker_utils import reduce_metrics

    return Answer({"loss_scale": 6.0}, reduce_metrics({"loss_scale": [8.0, 4.0]}))
