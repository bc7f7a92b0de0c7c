"""SkyRL on FSDP: where a model and its torch optimizer first stand together."""

from __future__ import annotations

from typing import Any

from precision_shim.adapting import Call, seam
from precision_shim.auditing.watching import watch

from ..fp16 import ScaledTraining


@seam(
    "skyrl.backends.skyrl_train.distributed.fsdp_strategy:FSDPStrategy._fsdp_init_train_model",
    "audit",
    group="fsdp",
    why="makes the optimizer of policy and critic",
    delete_when="SkyRL says which precision its optimizers have",
    relies_on=("AdamW",),
)
def train_model(call: Call) -> Any:
    """Audit the optimizer of a policy or a critic."""
    model, optimizer, scheduler = call.proceed()
    strategy = call.instance

    def scaler() -> Any:
        training = ScaledTraining.of(strategy)
        return None if training is None else training.scaler

    if optimizer is not None:
        watch(
            "skyrl",
            "policy" if type(model).__name__ == "HFModelWrapper" else "critic",
            optimizer,
            model=model,
            scaler=scaler,
        )
    return model, optimizer, scheduler
