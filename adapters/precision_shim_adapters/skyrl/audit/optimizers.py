"""SkyRL: audit the optimizers on FSDP, and report updates lost to rounding on every backend."""

from __future__ import annotations

from typing import Any

from precision_shim.adapting import Call, seam
from precision_shim.adapting.audit import is_wanted, meters, tell_asked, tell_without_effect, watch

from ...torch_fp16 import ScaledTraining
from ..config import asked_of, of_fsdp
from ..training.megatron import WORKER
from ..training.overflow import BASE, add_figures

_FSDP = "skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker"
_LOST: dict[str, Any] = {
    "feature": "audit",
    "group": "metrics",
    "delete_when": "SkyRL says which of its updates are lost to rounding",
    "optional": True,
}


@seam(
    feature="audit",
    at=[f"{_FSDP}:FSDP{role}WorkerBase.init_model" for role in ("Policy", "Critic", "Ref")],
    group="fsdp",
    why="model, optimizer and the trainer's config stand together for the first time",
    delete_when="SkyRL says which precision its optimizers have",
    relies_on=("strategy", "prepare", "fsdp_config", "model", "cfg"),
)
def look_at_worker(call: Call) -> Any:
    """Audit the optimizer of a worker on FSDP; of a reference model, tell keys without effect."""
    result = call.proceed()
    worker = call.instance
    config, strategy = worker.strategy.fsdp_config, worker.strategy
    others = (one for one in ("critic", "ref") if getattr(worker.cfg, one).fsdp_config is config)
    role = next(others, "policy")
    wrote = of_fsdp(worker.cfg, role)
    if getattr(worker, "optimizer", None) is None:
        tell_without_effect("skyrl", role, wrote, {})
    else:
        watch(
            "skyrl",
            role,
            worker.optimizer,
            model=worker.model,
            scaler=(strategy, ScaledTraining.scaler_of),
            fp32_key="bf16=False of SkyRL's model",
            wrote=wrote,
        )
    return result


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
    """Record the inference engines' weight dtypes, for the audit."""
    if is_wanted():
        tell_asked("skyrl", *asked_of(inference_engine_cfg))
    return await call.proceed()
