"""Runs a framework's probes: each holds on the installed version and fails on a planted change.

    python -m tests.planted verl

The command prints two lines of JSON: each probe's outcome without its plant, and with it. The
framework is imported once, with the tests' stand-ins for what a CPU lacks.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

Plant = Callable[[pytest.MonkeyPatch], None]
MEGATRON, FP16 = (
    "precision_shim_adapters.megatron.reading.probes",
    "precision_shim_adapters.fp16.probes",
)


def at(place: str, value: Any) -> Plant:
    """Plant: replace a framework's ``module:name`` by ``value``."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        owner, name = _find(place)
        patch.setattr(owner, name, value, raising=False)

    return plant


def around(place: str, make: Callable[[Any], Any]) -> Plant:
    """Plant: replace a framework's ``module:name`` by what ``make`` returns for it."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        owner, name = _find(place)
        patch.setattr(owner, name, make(getattr(owner, name)))

    return plant


def _find(place: str) -> tuple[Any, str]:
    module, _, path = place.partition(":")
    *outer, name = path.split(".")
    owner = importlib.import_module(module)
    for one in outer:
        owner = getattr(owner, one)
    return owner, name


def raises(*args: Any, **kwargs: Any) -> Any:
    """A planted function that raises an error."""
    raise ValueError("planted")


def nothing(*args: Any, **kwargs: Any) -> None:
    """A planted function that does nothing."""


def with_fields(**fields: Any) -> Callable[[Any], Any]:
    """Wrap a config class so that it sets these fields, whatever its arguments are."""
    return lambda own: lambda *args, **given: own(*args, **{**given, **fields})


def then(after: Callable[..., Any]) -> Callable[[Any], Any]:
    """Wrap a method so that ``after`` gets its result and its arguments."""

    def make(own: Any) -> Any:
        def method(*args: Any, **kwargs: Any) -> Any:
            return after(own(*args, **kwargs), *args, **kwargs)

        return method

    return make


# -- what every framework on Megatron has ----------------------------------------------------------


def _keeps_gradients_in(result: Any, optimizer: Any) -> None:
    for group in optimizer.optimizer.param_groups:
        for one in group["params"]:
            one.decoupled_grad = one.decoupled_grad.to(optimizer.config.main_grads_dtype)


def _halves_at_once(scaler: Any, overflowed: bool) -> None:
    if overflowed:
        scaler._scale.mul_(0.5)


def _always_fp32(own: Any) -> Any:
    def init(self: Any, config: Any, ddp_config: Any, module: Any) -> None:
        ddp_config.grad_reduce_in_fp32 = True
        own(self, config, ddp_config, module)

    return init


def _renamed(states: dict[str, Any], *args: Any) -> dict[str, Any]:
    return {"remainder" if name == "param" else name: value for name, value in states.items()}


CORE = "megatron.core.optimizer"
CHECK = f"{CORE}.optimizer_config:OptimizerConfig.__post_init__"
MEGATRONS: dict[str, Plant] = {
    "precision-aware optimizer needs the distributed optimizer": at(CHECK, nothing),
    "precision-aware optimizer needs adam": at(CHECK, nothing),
    "precision-aware optimizer runs with both": at(CHECK, raises),
    "low-precision states need the precision-aware optimizer": at(CHECK, nothing),
    "fp8 recipes without FusedAdam's masters": around(
        CHECK,
        then(
            lambda result, self: setattr(
                self, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", True
            )
        ),
    ),
    "Megatron's defaults": around(
        CHECK, then(lambda result, self: setattr(self, "adam_beta2", 0.95))
    ),
    "an overflow is an answer and no exception": at(
        f"{CORE}.optimizer:MixedPrecisionOptimizer.step", raises
    ),
    "the scaler of Megatron": at(f"{CORE}.grad_scaler:DynamicGradScaler.update", _halves_at_once),
    "remainders stand under the master's name": around(
        f"{CORE}.distrib_optimizer:DistributedOptimizer._get_main_param_and_optimizer_states",
        then(_renamed),
    ),
    "the dtype of a gradient bucket": around(
        "megatron.core.distributed:DistributedDataParallel.__init__", _always_fp32
    ),
    "DDP's check of gradients ends the job": at(
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.check_grads",
        nothing,
    ),
    "main_grads_dtype is a name": around(
        f"{CORE}.distrib_optimizer:DistributedOptimizer._copy_model_grads_to_main_grads",
        then(_keeps_gradients_in),
    ),
    "fp16 gradients are not clipped": at(
        f"{CORE}.clip_grads:clip_grad_by_total_norm_fp32", nothing
    ),
    "Megatron-Bridge leaves the bucket and the checks to Megatron": around(
        "megatron.bridge.training.config:DistributedDataParallelConfig",
        with_fields(grad_reduce_in_fp32=True),
    ),
}


# -- torch -----------------------------------------------------------------------------------------


def _in_fp32(own: Any) -> Any:
    class AdamW(own):  # type: ignore[misc]
        def step(self, *args: Any, **kwargs: Any) -> None:
            super().step(*args, **kwargs)
            for state in self.state.values():
                state["exp_avg"] = state["exp_avg"].float()

    return AdamW


def _never_updates(own: Any) -> Any:
    return type("GradScaler", (own,), {"update": nothing})


TORCHS: dict[str, Plant] = {
    "AdamW's states follow the parameters": around("torch.optim:AdamW", _in_fp32),
    "torch's scaler skips and halves": around("torch.amp:GradScaler", _never_updates),
    "a distributed checkpoint steps the optimizer": at(
        "torch.distributed.checkpoint.state_dict:get_optimizer_state_dict", nothing
    ),
}


# -- verl ------------------------------------------------------------------------------------------


def _on_verl() -> None:
    from .megatron_bridge import import_megatron_bridge

    if importlib.util.find_spec("megatron.bridge") is not None:
        import_megatron_bridge()


def _aligns_in_source(patch: pytest.MonkeyPatch) -> None:
    from precision_shim_adapters.verl import probes

    if hasattr(_find(f"{_ENGINE}:MegatronEngine.x")[0], "_resolve_override_ddp_config"):
        at(f"{_ENGINE}:MegatronEngine._resolve_override_ddp_config", lambda self: {})(patch)
        return
    # Before 0.9 there is no function to replace: another method's source contains the code.
    symbol = SimpleNamespace(found=False, names=frozenset({"grad_reduce_in_fp32"}))
    patch.setattr(probes, "look", lambda target: symbol)


def _low(own: Any) -> Any:
    import torch

    fields = {"use_precision_aware_optimizer": True, "exp_avg_sq_dtype": torch.bfloat16}
    return with_fields(**fields)(own)


_ENGINE = "verl.workers.engine.megatron.transformer_impl"
_VERLS_CONFIG = "verl.utils.megatron.optimizer:OptimizerConfig"
VERLS: dict[str, Plant] = {
    "verl's Megatron engine raises on an overflow": at(
        f"{_ENGINE}:MegatronEngine.optimizer_step", nothing
    ),
    "verl's fp16 row": around(_VERLS_CONFIG, with_fields(initial_loss_scale=4096)),
    "override_optimizer_config goes over all else, as it is written": around(
        _VERLS_CONFIG, with_fields(initial_loss_scale=4096)
    ),
    "what verl's opt-in does": around(_VERLS_CONFIG, _low),
    "what verl aligns itself": _aligns_in_source,
    "verl's own bucket is fp32": around(
        "verl.utils.megatron_utils:DistributedDataParallelConfig",
        with_fields(grad_reduce_in_fp32=False),
    ),
    "verl's FSDP engine and a gradient that is not finite": at(
        "verl.workers.engine.fsdp.transformer_impl:FSDPEngine.optimizer_step",
        lambda self: self.optimizer.step(),
    ),
}


# -- SkyRL -----------------------------------------------------------------------------------------


def _on_skyrl() -> None:
    from .skyrl.cpu import flash_attn_placeholder, import_megatron

    sys.path.insert(0, str(flash_attn_placeholder(Path(tempfile.mkdtemp(prefix="flash_attn")))))
    import_megatron()


def _coerces_the_other_way(patch: pytest.MonkeyPatch) -> None:
    import torch

    module, name = _find(f"{_SKYRL}.distributed.megatron.optimizer:coerce_optimizer_dtype_kwargs")
    if hasattr(module, name):
        patch.setattr(module, name, lambda given: given)
    else:
        fields = with_fields(exp_avg_dtype=torch.float32)
        patch.setattr(module, "OptimizerConfig", fields(module.OptimizerConfig))


_SKYRL = "skyrl.backends.skyrl_train"
SKYRLS: dict[str, Plant] = {
    "SkyRL's optimizer config is bf16 beneath what the user wrote": around(
        f"{_SKYRL}.distributed.megatron.optimizer:OptimizerConfig", with_fields(bf16=False)
    ),
    "which dtype names SkyRL coerces": _coerces_the_other_way,
    "SkyRL's defaults": around(
        "skyrl.train.config.config:MegatronDDPConfig", with_fields(grad_reduce_in_fp32=False)
    ),
    "a step that Megatron skipped leaves no trace": at(
        f"{_SKYRL}.distributed.megatron.megatron_strategy:MegatronStrategy.optimizer_step", nothing
    ),
    "SkyRL's FSDP strategy and a gradient that is not finite": at(
        f"{_SKYRL}.distributed.fsdp_strategy:FSDPStrategy.optimizer_step",
        lambda self, optimizer, *rest: optimizer.step(),
    ),
    "SkyRL takes means of metrics": at(
        f"{_SKYRL}.workers.worker_utils:reduce_metrics",
        lambda found: {name: values[-1] for name, values in found.items()},
    ),
}


# -- NeMo-RL ---------------------------------------------------------------------------------------


def _on_nemo_rl() -> None:
    from .megatron_bridge import import_megatron_bridge

    if importlib.util.find_spec("megatron.bridge") is not None:
        import_megatron_bridge()


def _plain_workers(patch: pytest.MonkeyPatch) -> None:
    from precision_shim_adapters.nemo_rl.places import DTENSOR

    for one in DTENSOR:
        if one.module in sys.modules:
            patch.setattr(sys.modules[one.module], one.name, type(one.name, (), {}), raising=False)


def _scaled_with_the_loss(patch: pytest.MonkeyPatch) -> None:
    import torch
    from nemo_automodel.components.moe.megatron import moe_utils

    class MoEAuxLossAutoScaler(torch.autograd.Function):
        main_loss_backward_scale = None

        @staticmethod
        def forward(ctx: Any, output: Any, loss: Any) -> Any:
            return output.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient, gradient

    patch.setattr(moe_utils, "MoEAuxLossAutoScaler", MoEAuxLossAutoScaler, raising=False)


_AUTOMODEL = "nemo_automodel.components"
NEMO_RLS: dict[str, Plant] = {
    "NeMo-RL's dtypes": around(
        "nemo_rl.models.automodel.setup:STRING_TO_DTYPE",
        lambda own: {**own, "fp16": own["float16"]},
    ),
    "NeMo-RL's workers are actor classes": _plain_workers,
    "the first DTensor worker's norm of a gradient that is not finite": at(
        "nemo_rl.models.dtensor.parallelize:get_grad_norm", raises
    ),
    "the second DTensor worker's norm of a gradient that is not finite": at(
        f"{_AUTOMODEL}.training.utils:scale_grads_and_clip_grad_norm",
        lambda *args, **kwargs: 0.0,
    ),
    "auxiliary losses of experts have a scale of their own": _scaled_with_the_loss,
}


# -- torchtitan ------------------------------------------------------------------------------------


def _on_torchtitan() -> None:
    from .torchtitan.cpu import answer_for_gpus

    answer_for_gpus()


def _one_name_more(patch: pytest.MonkeyPatch) -> None:
    from typing import Literal

    from torchtitan.config.configs import TrainingConfig

    kinds = TrainingConfig.__annotations__
    patch.setitem(kinds, "mixed_precision_param", Literal["bfloat16", "float32", "float16"])


def _endpoint_without_a_step(patch: pytest.MonkeyPatch) -> None:
    from torchtitan.experiments.rl.actors import trainer

    async def optim_step(self: Any) -> Any:
        return SimpleNamespace(metrics={})

    method = SimpleNamespace(__wrapped__=optim_step)
    patch.setattr(trainer.PolicyTrainer, "optim_step", SimpleNamespace(_method=method))


def _in_its_own_dtype(self: Any, query: Any, *rest: Any, **options: Any) -> Any:
    from torchtitan.models.common import attention

    return attention.varlen_attn(query)


TORCHTITANS: dict[str, Plant] = {
    "torchtitan's names of dtypes": around(
        "torchtitan.config:TORCH_DTYPE_MAP", lambda own: {**own, "fp16": own["float16"]}
    ),
    "torchtitan's defaults and its command line": _one_name_more,
    "torchtitan steps on a gradient that is not finite": at(
        "torchtitan.trainer:Trainer.train_step", nothing
    ),
    "torchtitan's RL trainer steps on a gradient that is not finite": _endpoint_without_a_step,
    "the chunked loss goes back by itself": at(
        "torchtitan.components.loss:ChunkedLossWrapper.__call__", nothing
    ),
    "states are made by a step that counts": at(
        "torchtitan.components.optimizer.utils:init_optim_state", nothing
    ),
    "varlen attention is bfloat16": at(
        "torchtitan.models.common.attention:VarlenAttention.forward", _in_its_own_dtype
    ),
}

FRAMEWORKS: dict[str, tuple[Callable[[], None], dict[str, Plant]]] = {
    "verl": (_on_verl, {**MEGATRONS, **TORCHS, **VERLS}),
    "skyrl": (_on_skyrl, {**MEGATRONS, **TORCHS, **SKYRLS}),
    "nemo-rl": (_on_nemo_rl, {**MEGATRONS, **TORCHS, **NEMO_RLS}),
    "torchtitan": (_on_torchtitan, {**TORCHS, **TORCHTITANS}),
}


def main(framework: str) -> None:
    """Run a framework's probes without and with their plants."""
    from precision_shim.process.registry import entries, load
    from precision_shim.upstream.probes import probes_in, run

    output, sys.stdout = sys.stdout, sys.stderr  # frameworks print
    prepare, plants = FRAMEWORKS[framework]
    prepare()
    modules = load(entries(third_party=False)[framework]).probes
    probes = [one for module in modules for one in probes_in(module)]
    outcomes = [run(one) for one in probes]
    planted = {}
    for probe, outcome in zip(probes, outcomes, strict=True):
        if outcome.state == "holds":
            with pytest.MonkeyPatch.context() as patch:
                plants.get(probe.name, functools.partial(nothing))(patch)
                planted[probe.name] = asdict(run(probe))
    sys.stdout = output
    print(json.dumps([asdict(one) for one in outcomes]))
    print(json.dumps(planted))


if __name__ == "__main__":
    main(sys.argv[1])
