"""SkyRL: audit the optimizers on FSDP, and report updates lost to rounding on every backend."""

from __future__ import annotations

from typing import Any

from precision_shim.adapting import Call, seam
from precision_shim.auditing import meters
from precision_shim.auditing.automatic import watch
from precision_shim.auditing.weight_audit import is_wanted, tell_asked

from ...torch_fp16 import ScaledTraining
from ..rollout.dtypes import asked_of, way_of_weights
from ..training.dtype_keys import written
from ..training.megatron import WORKER
from ..training.overflow import BASE, add_figures

_LOST: dict[str, Any] = {
    "feature": "audit",
    "group": "metrics",
    "delete_when": "SkyRL says which of its updates are lost to rounding",
    "optional": True,
}


@seam(
    "skyrl.backends.skyrl_train.distributed.fsdp_strategy:FSDPStrategy._fsdp_init_train_model",
    "audit",
    group="fsdp",
    why="makes the optimizer of policy and critic",
    delete_when="SkyRL says which precision its optimizers have",
    relies_on=("AdamW",),
)
def train_model(call: Call) -> Any:
    """Audit the optimizer of a policy or a critic on FSDP."""
    model, optimizer, scheduler = call.proceed()
    strategy = call.instance
    if optimizer is not None:
        subject = "policy" if type(model).__name__ == "HFModelWrapper" else "critic"
        watch(
            "skyrl",
            subject,
            optimizer,
            model=model,
            scaler=lambda: getattr(ScaledTraining.of(strategy), "scaler", None),
            mend="bf16=False of SkyRL's model",
            wrote=written(strategy.fsdp_config),
        )
    return model, optimizer, scheduler


@seam(
    at=[
        f"{WORKER}:MegatronPolicyWorkerBase.forward_backward",
        f"{BASE}:PolicyWorkerBase.forward_backward",
        f"{BASE}:CriticWorkerBase.forward_backward",
    ],
    why="returns the metrics that the trainer logs, reduced over the ranks",
    relies_on=("all_reduce_metrics", "optimizer"),
    **_LOST,
)
def report_lost_updates(call: Call) -> Any:
    """Add the fractions of weight updates lost to rounding to ``forward_backward``'s metrics."""
    output = call.proceed()
    add_figures(output, meters.metrics(getattr(call.instance, "optimizer", None)))
    return output


@seam(
    f"{BASE}:Worker.init_weight_sync_state",
    why="the worker learns here which dtype the inference engines have",
    relies_on=("inference_engine_cfg", "cfg"),
    **_LOST,
)
async def know_rollout(call: Call, inference_engine_cfg: Any) -> Any:
    """Record the inference engines' weight dtypes, for the audit and the count of lost updates."""
    worker = call.instance
    if is_wanted():
        tell_asked("skyrl", *asked_of(inference_engine_cfg))
    names = way_of_weights(inference_engine_cfg, str(worker.cfg.policy.model.path))
    # Megatron-Bridge merges LoRA into the weights that it exports.
    factors = worker.cfg.strategy != "megatron"
    meters.tell_rollout(getattr(worker, "optimizer", None), *names, factors=factors)
    return await call.proceed()
