"""Probes that check whether the installed Megatron behaves as the shim's code assumes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from precision_shim.adapting import Answer, probe

_CONFIG = "megatron.core.optimizer.optimizer_config"
_OPTIMIZER = "megatron.core.optimizer.optimizer"
_DDP = "megatron.core.distributed.distributed_data_parallel_config"
_BRIDGE = "megatron.bridge.training.config"
_OBSTACLES = "precision_shim_adapters.megatron.deciding.table:obstacles"
_PLAN = "precision_shim_adapters.megatron.deciding.table:plan_optimizer"


def _config(**fields: Any) -> Any:
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    return OptimizerConfig(**fields)


@contextmanager
def fused_adam() -> Iterator[None]:
    """Provide TransformerEngine, or its stand-in if TransformerEngine is not installed."""
    from precision_shim.testing.transformer_engine import (
        real_transformer_engine,
        stand_in_transformer_engine,
    )

    with nullcontext() if real_transformer_engine() else stand_in_transformer_engine():
        yield


def _refusal(**fields: Any) -> str:
    try:
        with fused_adam():
            _config(**fields)
    except Exception as error:  # an AssertionError in today's versions
        return str(error) or type(error).__name__
    return ""


@probe(
    "precision-aware optimizer needs the distributed optimizer",
    assumes="Megatron refuses use_precision_aware_optimizer without use_distributed_optimizer",
    rule=_OBSTACLES,
    needs=(_CONFIG,),
)
def distributed_optimizer() -> Answer:
    """The shim keeps fp32 states if the distributed optimizer is off."""
    told = _refusal(
        optimizer="adam", use_precision_aware_optimizer=True, use_distributed_optimizer=False
    )
    named = "distributed optimizer" in told.replace("_", " ")
    return Answer("refused for it", "refused for it" if named else told or "accepted")


@probe(
    "precision-aware optimizer needs adam",
    assumes="Megatron refuses use_precision_aware_optimizer with another optimizer than adam",
    rule=_OBSTACLES,
    needs=(_CONFIG,),
)
def only_adam() -> Answer:
    """The shim keeps fp32 states if the optimizer is not adam."""
    told = _refusal(
        optimizer="sgd", use_precision_aware_optimizer=True, use_distributed_optimizer=True
    )
    return Answer("refused for it", "refused for it" if "adam" in told else told or "accepted")


@probe(
    "precision-aware optimizer runs with both",
    assumes="Megatron takes bf16 main gradients and moments with adam, the distributed optimizer "
    "and TransformerEngine's FusedAdam",
    rule=_PLAN,
    needs=(_CONFIG,),
)
def accepted() -> Answer:
    """The shim sets bf16 main grads and bf16 moments for a bf16 model."""
    states = ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    told = _refusal(
        optimizer="adam",
        bf16=True,
        params_dtype=torch.bfloat16,
        use_precision_aware_optimizer=True,
        use_distributed_optimizer=True,
        **dict.fromkeys(states, torch.bfloat16),
    )
    return Answer("accepted", told or "accepted")


@probe(
    "low-precision states need the precision-aware optimizer",
    assumes="without it Megatron takes main gradients, masters and moments at fp32 only",
    rule="precision_shim_adapters.megatron.deciding.legality:NEED_PRECISION_AWARE",
    needs=(_CONFIG,),
)
def states_need_it() -> Answer:
    """The shim writes ``use_precision_aware_optimizer=False`` only if all states are fp32."""
    wanted = {
        "main_grads_dtype": torch.bfloat16,
        "main_params_dtype": torch.float16,
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.bfloat16,
    }
    refused = [name for name, dtype in wanted.items() if name in _refusal(**{name: dtype})]
    return Answer(list(wanted), refused)


@probe(
    "fp8 recipes without FusedAdam's masters",
    assumes="with a recipe other than delayed Megatron keeps the masters itself",
    rule=_OBSTACLES,
    needs=(_CONFIG,),
)
def fp8_recipes() -> Answer:
    """The shim keeps fp32 states if the fp8 recipe is not ``delayed``."""
    found = {}
    for recipe in ("delayed", "tensorwise"):
        with fused_adam():
            made = _config(
                use_precision_aware_optimizer=True,
                use_distributed_optimizer=True,
                fp8_recipe=recipe,
            )
        found[recipe] = made.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    return Answer({"delayed": True, "tensorwise": False}, found)


@probe(
    "Megatron's defaults",
    assumes="what the shim does not set is an fp32 state, remainders, beta2 0.999, a dynamic scale",
    rule=_PLAN,
    needs=(_CONFIG, _DDP),
)
def defaults() -> Answer:
    """The shim relies on Megatron's default beta2 and on the defaults of fields that it omits."""
    from megatron.core.distributed.distributed_data_parallel_config import (
        DistributedDataParallelConfig,
    )

    from precision_shim_adapters.megatron.deciding.table import MEGATRON_BETA2

    made = _config()
    bucket = DistributedDataParallelConfig()
    assumed = {
        "adam_beta2": MEGATRON_BETA2,
        "main_params_dtype": torch.float32,
        "exp_avg_dtype": torch.float32,
        "exp_avg_sq_dtype": torch.float32,
        "store_param_remainders": True,
        "use_precision_aware_optimizer": False,
        "loss_scale": None,
        "grad_reduce_in_fp32": False,
        "check_for_nan_in_grad": False,
    }
    found = {
        name: getattr(bucket if hasattr(bucket, name) else made, name, "no such field")
        for name in assumed
    }
    return Answer(assumed, found)


@probe(
    "an overflow is an answer and no exception",
    assumes="MixedPrecisionOptimizer.step answers (False, None, None) and takes no step",
    rule="precision_shim_adapters.megatron.acting.overflow:skipping",
    needs=(_OPTIMIZER,),
)
def overflow() -> Answer:
    """The shim replaces ``(False, None, None)``, which Megatron returns for an overflow."""
    from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

    steps: list[str] = []
    optimizer = SimpleNamespace(
        config=_config(),
        prepare_grads=lambda: True,
        step_with_ready_grads=lambda: steps.append("step"),
    )
    answer = MixedPrecisionOptimizer.step(optimizer)
    return Answer(((False, None, None), []), (answer, steps))


@probe(
    "the scaler of Megatron",
    assumes="DynamicGradScaler puts a new tensor in its scale's place, halves it after hysteresis "
    "overflows, never below its minimum, doubles it after enough good steps, and saves scale and "
    "both trackers",
    rule="precision_shim_adapters.megatron.acting.overflow:scale_of",
    needs=("megatron.core.optimizer.grad_scaler",),
)
def dynamic_scaler() -> Answer:
    """The shim reads the scale from the device only after Megatron replaced the scale's tensor."""
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    from precision_shim.testing.megatron_cpu import cuda_means_cpu

    with cuda_means_cpu():
        scaler = DynamicGradScaler(8.0, 4.0, 2.0, 0.5, 2, 2)
        before = scaler.scale
        scales = []
        for step in "-xxx-x--x----x-":  # x: an overflow
            scaler.update(step == "x")
            scales.append(float(scaler.scale))
        saved = {name: float(value) for name, value in scaler.state_dict().items()}
        found = (scales, float(before), scaler.scale is before, saved)
    assumed = [8.0, 8.0, 4.0, 4.0, 4.0, 4.0, 4.0, 8.0, 8.0, 8.0, 16.0, 16.0, 32.0, 32.0, 32.0]
    kept = {"scale": 32.0, "growth_tracker": 1.0, "hysteresis_tracker": 1.0}
    return Answer((assumed, 8.0, False, kept), found)


@probe(
    "remainders stand under the master's name",
    assumes="DistributedOptimizer hands FusedAdam's int16 remainders on as the state 'param'",
    rule="precision_shim_adapters.megatron.resuming.checkpoint:STATES",
    needs=("megatron.core.optimizer.distrib_optimizer",),
)
def remainders() -> Answer:
    """The shim writes fp32 master weights, not remainders, as the state ``param``."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
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
    dtypes = {name: str(value.dtype) for name, value in found.items()}
    return Answer({"exp_avg": "torch.float32", "param": "torch.int16"}, dtypes)


@contextmanager
def _chunk(**ddp: Any) -> Iterator[Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    from precision_shim.testing.megatron_cpu import megatron_on_cpu, model_parallel

    with megatron_on_cpu(), model_parallel():
        config = TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True
        )
        layer: Any = torch.nn.Linear(8, 8).bfloat16()
        layer.config = config
        yield DistributedDataParallel(
            config=config, ddp_config=DistributedDataParallelConfig(**ddp), module=layer
        )


@probe(
    "the dtype of a gradient bucket",
    assumes="a bucket is fp32 with grad_reduce_in_fp32, and has its parameters' dtype without",
    rule="precision_shim_adapters.megatron.deciding.bucket:choose_bucket",
    needs=("megatron.core.distributed", "megatron.core.transformer"),
)
def bucket() -> Answer:
    """The shim sets ``grad_reduce_in_fp32``, which decides the gradients' dtype."""
    found = {}
    for in_fp32 in (True, False):
        with _chunk(grad_reduce_in_fp32=in_fp32) as chunk:
            found[in_fp32] = str(chunk.buffers[0].grad_data.dtype)
    return Answer({True: "torch.float32", False: "torch.bfloat16"}, found)


@probe(
    "DDP's check of gradients ends the job",
    assumes="with check_for_nan_in_grad a gradient that is not finite is an exception, without it "
    "nothing",
    rule="precision_shim_adapters.megatron.acting.ddp:build_ddp",
    needs=("megatron.core.distributed", "megatron.core.transformer"),
)
def gradient_check() -> Answer:
    """The shim turns off the DDP's check of gradients if a dynamic scaler skips overflows."""
    found = {}
    for checks in (True, False):
        with _chunk(check_for_nan_in_grad=checks) as chunk:
            chunk.buffers[0].grad_data.fill_(float("inf"))
            try:
                chunk.finish_grad_sync()
                found[checks] = "goes on"
            except Exception as error:
                found[checks] = "raises" if "grad" in str(error) else repr(error)
    return Answer({True: "raises", False: "goes on"}, found)


@probe(
    "main_grads_dtype is a name",
    assumes="a precision-aware optimizer reads its gradients from the bucket as they are, and "
    "names its states in checkpoints by the bucket's dtype",
    rule="precision_shim_adapters.megatron.deciding.bucket:choose_bucket",
    needs=("megatron.core.optimizer", "megatron.core.distributed", "megatron.core.transformer"),
)
def main_grads() -> Answer:
    """The bucket gets ``main_grads_dtype``; checkpoint keys stay those of an unpatched job."""
    from megatron.core.optimizer import get_megatron_optimizer

    fp32, bf16 = torch.float32, torch.bfloat16
    assumed, found = {}, {}
    for in_fp32, asked in ((True, bf16), (False, fp32)):
        with ExitStack() as stack:
            stack.enter_context(fused_adam())
            chunk = stack.enter_context(
                _chunk(grad_reduce_in_fp32=in_fp32, use_distributed_optimizer=True)
            )
            config = _config(
                optimizer="adam",
                lr=1e-3,
                bf16=True,
                params_dtype=bf16,
                use_precision_aware_optimizer=True,
                use_distributed_optimizer=True,
                main_grads_dtype=asked,
            )
            made = get_megatron_optimizer(config, [chunk])
            (inner,) = getattr(made, "chained_optimizers", [made])
            inner._copy_model_grads_to_main_grads()
            ((parameter, *_),) = [group["params"] for group in inner.optimizer.param_groups][:1]
            keys = [list(ranges) for ranges in inner.gbuf_ranges]
            found[str(asked)] = (parameter.decoupled_grad.dtype, keys)
        real = fp32 if in_fp32 else bf16
        assumed[str(asked)] = (real, [[(bf16, real)]])
    return Answer(assumed, found)


@probe(
    "fp16 gradients are not clipped",
    assumes="with a precision-aware optimizer Megatron clips fp32 and bf16 gradients, and stops at "
    "fp16 ones",
    rule="precision_shim_adapters.megatron.acting.optimizer:check",
    needs=("megatron.core.optimizer.clip_grads",),
)
def fp16_clipping() -> Answer:
    """When the optimizer is built, the shim raises an error if fp16 gradients would be clipped."""
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    from precision_shim.testing.megatron_cpu import megatron_on_cpu

    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        parameter = torch.nn.Parameter(torch.zeros(2))
        parameter.decoupled_grad = torch.ones(2, dtype=dtype)  # type: ignore[attr-defined]
        try:
            with megatron_on_cpu():
                clip_grad_by_total_norm_fp32([parameter], 1.0, 0.5, use_decoupled_grad=True)
            found[str(dtype)] = "taken"
        except AssertionError:
            found[str(dtype)] = "refused"
    taken = dict.fromkeys(("torch.float32", "torch.bfloat16"), "taken")
    return Answer({**taken, "torch.float16": "refused"}, found)


@probe(
    "Megatron-Bridge leaves the bucket and the checks to Megatron",
    assumes="its DDP config reduces in the parameters' dtype by default, and its OptimizerConfig "
    "is checked by Megatron when it is made or finalized",
    rule="precision_shim_adapters.nemo_rl.megatron:set_up_optimizer",
    needs=(_BRIDGE,),
)
def bridge_configs() -> Answer:
    """Megatron-Bridge needs no seam: the bucket has the model's dtype, Megatron checks configs."""
    from megatron.bridge.training.config import DistributedDataParallelConfig, OptimizerConfig

    with fused_adam():
        try:
            made = OptimizerConfig(exp_avg_dtype=torch.bfloat16)
            getattr(made, "finalize", lambda: None)()
            told = "accepted"
        except AssertionError:
            told = "refused"
    found = (DistributedDataParallelConfig().grad_reduce_in_fp32, told)
    return Answer((False, "refused"), found)


@probe(
    "which dtypes FusedAdam takes",
    assumes="TransformerEngine's FusedAdam takes the dtypes that our table has for its release",
    rule="precision_shim_adapters.megatron.deciding.legality:legal_dtypes",
    needs=("transformer_engine.pytorch.optimizers",),
)
def legality() -> Answer:
    """The shim raises an error for an illegal dtype before the framework builds the optimizer."""
    import transformer_engine
    from transformer_engine.pytorch.optimizers import FusedAdam

    from precision_shim.testing.megatron_cpu import cuda_means_cpu
    from precision_shim_adapters.megatron.deciding.legality import (
        FusedAdamSupport,
        legal_dtypes,
        release,
    )

    support = FusedAdamSupport(release(str(transformer_engine.__version__)), True, "")
    arguments = {
        "main_params_dtype": "master_weight_dtype",
        "exp_avg_dtype": "exp_avg_dtype",
        "exp_avg_sq_dtype": "exp_avg_sq_dtype",
    }
    assumed, found = {}, {}
    for field, argument in arguments.items():
        taken = []
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.uint8):
            parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
            try:
                with cuda_means_cpu():
                    FusedAdam([parameter], lr=1e-3, master_weights=True, **{argument: dtype})
            except RuntimeError:
                continue
            taken.append(str(dtype))
        assumed[field] = sorted(map(str, legal_dtypes(field, support) or ()))
        found[field] = sorted(taken)
    return Answer(assumed, found)
