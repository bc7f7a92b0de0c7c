"""The audit of both trainers: where a model and its optimizers first stand together."""

from __future__ import annotations

from typing import Any

from precision_shim.adapting import Call, seam
from precision_shim.auditing.watching import watch

from ..fp16 import ScaledTraining
from .places import FRAMEWORK, POLICY, PRETRAINING, RL, TRAINER

FEATURE = "audit"
_WHY = "model parts and optimizers stand together, and the scaler was made"
_DELETE = "torchtitan says which precision its optimizers have"


def _see(trainer: Any, subject: str) -> None:
    optimizers = list(trainer.optimizers)
    if not optimizers:
        return

    def scaler() -> Any:
        training = ScaledTraining.of(trainer)
        return None if training is None else training.scaler

    watch(
        FRAMEWORK,
        subject,
        trainer.optimizers,
        # A skipped step runs the container's step, and none of those within it: they have no
        # states then. They step in this order.
        inner=optimizers[-1],
        model=trainer.model_parts,
        scaler=scaler,
    )


@seam(
    f"{POLICY}.__init__",
    FEATURE,
    group=RL,
    why=_WHY,
    delete_when=_DELETE,
    relies_on=("optimizers", "model_parts"),
    optional=True,
)
def policy(call: Call) -> None:
    """Audit the optimizers of an RL trainer."""
    call.proceed()
    _see(call.instance, "policy")


@seam(
    f"{TRAINER}.__init__",
    FEATURE,
    group=PRETRAINING,
    why=_WHY,
    delete_when=_DELETE,
    relies_on=("optimizers", "model_parts"),
)
def trainer(call: Call) -> None:
    """Audit the optimizers of a pre-training or SFT trainer."""
    call.proceed()
    _see(call.instance, "model")
