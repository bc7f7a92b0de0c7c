"""Probes that check the shim's assumptions about the installed verl."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from precision_shim.adapting import Answer, look, probe
from precision_shim_adapters.megatron.deciding.table import ROWS

from ..megatron.reading.probes import fused_adam

_ENGINE = "verl.workers.engine.megatron.transformer_impl"
_OPTIMIZER = "verl.utils.megatron.optimizer"
_MODEL = "verl.utils.megatron_utils"
_FSDP = "verl.workers.engine.fsdp.transformer_impl"
_OPT_IN = {
    "use_precision_aware_optimizer": True,
    "main_grads_dtype": "bf16",
    "exp_avg_dtype": "bf16",
    "exp_avg_sq_dtype": "fp32",
}


def _optimizer_config(fields: dict[str, Any] | None = None, **flags: bool) -> Any:
    from omegaconf import OmegaConf
    from verl.utils.megatron.optimizer import init_megatron_optim_config

    own = {"optimizer": "adam", "lr": 1e-3, "min_lr": 0.0, "clip_grad": 1.0, "weight_decay": 0.0}
    with fused_adam():
        return init_megatron_optim_config(OmegaConf.create({**own, **(fields or {})}), **flags)


@probe(
    "verl's Megatron engine raises on an overflow",
    assumes="MegatronEngine.optimizer_step raises NotImplementedError where no step was taken",
    rule="precision_shim_adapters.verl.megatron",
    needs=(_ENGINE,),
)
def overflow() -> Answer:
    """The shim reports a skipped step to verl as a successful step with grad norm NaN."""
    from verl.workers.engine.megatron.transformer_impl import MegatronEngine

    engine = SimpleNamespace(optimizer=SimpleNamespace(step=lambda: (False, None, None)))
    try:
        found = repr(MegatronEngine.optimizer_step(engine))
    except Exception as error:
        found = type(error).__name__
    return Answer("NotImplementedError", found)


@probe(
    "verl's fp16 row",
    assumes="verl's fp16 branch sets what our row for fp16 has",
    rule="precision_shim_adapters.verl.megatron:read_wishes",
    needs=(_OPTIMIZER,),
)
def fp16_row() -> Answer:
    """The shim relies on verl to set the OptimizerConfig fields that an fp16 model needs."""
    made, row = _optimizer_config(fp16=True), ROWS[torch.float16]
    return Answer(dict(row), {name: getattr(made, name, "no such field") for name in row})


@probe(
    "override_optimizer_config goes over all else, as it is written",
    assumes="verl merges override_optimizer_config over its own fields, and leaves strings strings",
    rule="precision_shim_adapters.verl.megatron:configure",
    needs=(_OPTIMIZER,),
)
def overrides() -> Answer:
    """The shim puts its values into ``override_optimizer_config``, with dtype names coerced."""
    written = {"initial_loss_scale": 8.0, "exp_avg_dtype": "bf16"}
    made = _optimizer_config({"override_optimizer_config": written}, fp16=True)
    return Answer(written, {name: getattr(made, name) for name in written})


@probe(
    "what verl's opt-in does",
    assumes="where init_megatron_optim_config takes bf16=, the opt-in's fields reach Megatron and "
    "bf16=False is fp32; elsewhere the fields do nothing",
    rule="precision_shim_adapters.verl.megatron:native_dispatch",
    needs=(_OPTIMIZER,),
)
def opt_in() -> Answer:
    """If verl itself sets the optimizer states' dtypes, the shim does not change the config."""
    from verl.utils.megatron.optimizer import init_megatron_optim_config

    made = _optimizer_config(_OPT_IN)
    found = [getattr(made, name) for name in _OPT_IN]
    fp32, bf16 = torch.float32, torch.bfloat16
    if "bf16" not in inspect.signature(init_megatron_optim_config).parameters:
        return Answer([False, fp32, fp32, fp32], found)
    plain = _optimizer_config(bf16=False)
    return Answer(
        ([True, bf16, bf16, fp32], (False, fp32)), (found, (plain.bf16, plain.params_dtype))
    )


@probe(
    "what verl aligns itself",
    assumes="an engine gives its DDP a bucket for the bf16 opt-in (0.9.0), for every optimizer "
    "config (0.9.1), or none at all (before)",
    rule="precision_shim_adapters.verl.megatron:native_bucket",
    needs=(_ENGINE,),
)
def alignment() -> Answer:
    """If verl does not set the bucket's dtype, the shim gives the bucket the main grads' dtype."""
    from omegaconf import OmegaConf
    from verl.workers.engine.megatron.transformer_impl import MegatronEngine

    symbol = look(f"{_ENGINE}:MegatronEngine._resolve_override_ddp_config")
    key = "grad_reduce_in_fp32"
    if not symbol.found:
        names = look(f"{_ENGINE}:MegatronEngine._build_megatron_module").names
        return Answer("no bucket", key if key in names else "no bucket")
    found = []
    for written, fields in (({}, {}), ({}, _OPT_IN), ({key: True}, _OPT_IN)):
        engine = SimpleNamespace(
            engine_config=SimpleNamespace(override_ddp_config=written),
            optimizer_config=OmegaConf.create({"optimizer": "adam", **fields}),
        )
        found.append(MegatronEngine._resolve_override_ddp_config(engine).get(key))
    for_all = "use_low_precision_main_grads" in symbol.names
    return Answer([True if for_all else None, False, True], found)


@probe(
    "verl's own bucket is fp32",
    assumes="get_model makes an fp32 bucket, whatever the model's dtype is, unless "
    "override_ddp_config has another",
    rule="precision_shim_adapters.verl.megatron:direct_build",
    needs=(_MODEL,),
)
def default_bucket() -> Answer:
    """verl's bucket is fp32 unless the user wrote another dtype."""
    from megatron.core.enums import ModelType
    from verl.utils import megatron_utils

    from precision_shim.testing.megatron_cpu import megatron_on_cpu, model_parallel, tiny_gpt

    # verl before 0.9 reads a member of ModelType that megatron-core 0.17 removed.
    kinds = SimpleNamespace(
        encoder_or_decoder=ModelType.encoder_or_decoder, encoder_and_decoder=object()
    )
    provider: Any = tiny_gpt(torch.bfloat16)
    found = []
    with (
        megatron_on_cpu(),
        model_parallel(),
        mock.patch.object(megatron_utils, "ModelType", kinds),
    ):
        for override in (None, {"grad_reduce_in_fp32": False}):
            (chunk,) = megatron_utils.get_model(
                provider, transformer_config=provider.config, override_ddp_config=override
            )
            found.append(str(chunk.buffers[0].grad_data.dtype))
    return Answer(["torch.float32", "torch.bfloat16"], found)


class _Calls:
    def __init__(self) -> None:
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.names.append(name)


@probe(
    "verl's FSDP engine and a gradient that is not finite",
    assumes="optimizer_step steps through the engine's scaler where verl has one (0.8), and by "
    "itself takes no step on a norm that is not finite",
    rule="precision_shim_adapters.verl.fsdp_loops:native_loop",
    needs=(_FSDP,),
)
def fsdp_step() -> Answer:
    """verl 0.8 steps with the shim's scaler; verl 0.7 itself skips a step with infinite norm."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    scales = "scaler" in look(f"{_FSDP}:FSDPEngine.optimizer_step").names
    found = []
    for scaler in (None, _Calls()):
        layer = torch.nn.Linear(1, 1)
        with torch.no_grad():
            layer.weight.fill_(1.0)
        layer.weight.grad = torch.full_like(layer.weight, float("inf"))
        engine = SimpleNamespace(
            optimizer_config=SimpleNamespace(clip_grad=1.0),
            module=layer,
            optimizer=torch.optim.SGD([layer.weight], lr=1.0),
            scaler=scaler,
            _qat_enabled=False,
        )
        norm = FSDPEngine.optimizer_step(engine)
        names = [] if scaler is None else scaler.names
        found.append((norm, layer.weight.item(), names))
    through = ["unscale_", "step", "update"] if scales else []
    norm = float("inf")
    return Answer([(norm, 1.0, []), (norm, 1.0, through)], found)
