"""What our rules assume of SkyRL, asked of the SkyRL that is installed."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from precision_shim.adapting import Answer, probe

_OPTIMIZER = "skyrl.backends.skyrl_train.distributed.megatron.optimizer"


@probe(
    "SkyRL's optimizer config is bf16 beneath what the user wrote",
    assumes="init_megatron_optim_config says bf16 whatever the model is, and merges "
    "optimizer_config_kwargs over its own",
    rule="precision_shim_adapters.skyrl.megatron:configure",
    needs=(_OPTIMIZER,),
)
def optimizer_config() -> Answer:
    """The shim's values come in through the kwargs."""
    from skyrl.backends.skyrl_train.distributed.megatron.optimizer import (
        init_megatron_optim_config,
    )

    plain = init_megatron_optim_config(SimpleNamespace(), {})
    written = init_megatron_optim_config(
        SimpleNamespace(), {"bf16": False, "params_dtype": torch.float32}
    )
    found = [
        (one.bf16, str(one.params_dtype), one.use_distributed_optimizer) for one in (plain, written)
    ]
    return Answer([(True, "torch.bfloat16", True), (False, "torch.float32", True)], found)
