"""ROLL on FSDP2 in fp16: complete scaled steps, count skipped steps, save the scaler.

ROLL scales its loss with torch's GradScaler. With a scaler, ROLL's loop neither steps the LR
scheduler nor clears the gradients, so the gradients add up over all steps. ROLL does not save the
scaler in checkpoints. A new job of ROLL leaves a checkpoint's moments out without a message.

Delete this module when ROLL completes a scaled step like any other step, and saves its scaler.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from precision_shim.adapting import Call, seam
from precision_shim.scaling import ScalerSettings

from .fp16 import FEATURE, ScaledTraining
from .fp16.files import files_of_rank
from .fp16.states import make_missing_states
from .fp16.stepping import note_skip
from .roll_checkpoints import FSDP2, has_states

GROUP = FSDP2
MODULE = "roll.distributed.strategy.fsdp2_strategy"
STRATEGY = f"{MODULE}:FSDP2TrainStrategy"
BASE = f"{MODULE}:FSDP2StrategyBase"
HERE: dict[str, Any] = {
    "feature": FEATURE,
    "group": GROUP,
    "optional": True,
    "delete_when": "ROLL ends a scaled step as it ends any other, and saves its scaler",
}
OWN = "ROLL's own scaler, counted and kept with the checkpoints"


@seam(f"{STRATEGY}.initialize", why="makes the scaler", relies_on=("scaler", "scheduler"), **HERE)
def make(call: Call) -> Any:
    """Replace ROLL's scaler by the shim's, which skips a step on all ranks and can be saved."""
    result = call.proceed()
    strategy = call.instance
    if type(strategy.scaler) is ShardedGradScaler:  # keep a user's own subclass
        ScaledTraining.make(
            "roll",
            strategy.worker_config.name,
            device=next(strategy.model.parameters()).device.type,
            because=OWN,
            framework_default=ScalerSettings(),
            drives=False,
        ).keep(strategy, "scaler")
    return result


def training_of(strategy: Any) -> ScaledTraining | None:
    """A strategy's ``ScaledTraining``; ``None`` if the strategy's loss is not scaled."""
    name = strategy.worker_config.name
    return ScaledTraining.of_attribute(strategy, "scaler", "roll", name)


@seam(f"{STRATEGY}.train_step", why="leaves a scaled step unfinished", **HERE)
def step(call: Call) -> Any:
    """Complete each scaled step; report loss scale and skips, and NaN as a skipped step's norm."""
    strategy = call.instance
    training = training_of(strategy)
    if training is None:
        return call.proceed()
    with _ended(strategy, training):
        found = call.proceed()
    name = strategy.worker_config.name
    key = f"{name}/grad_norm"
    if key in found:  # without a norm, the call only accumulated gradients
        found[key] = training.norm(found[key])
    return {**found, **training.metrics(f"{name}/")}


@contextmanager
def _ended(strategy: Any, training: ScaledTraining) -> Iterator[None]:
    """Step the scheduler and clear the gradients after a scaled step, unless ROLL does so.

    The shim compares ``scheduler.last_epoch`` when the next loss is scaled, or at the end of the
    call; by then, ROLL's own loop would have stepped the scheduler.
    """
    scaler, scheduler = strategy.scaler, strategy.scheduler
    at: list[int] = []

    def end() -> None:
        if at and scheduler.last_epoch == at.pop():
            if training.skipped:
                note_skip(strategy.optimizer, ())
            scheduler.step()
            strategy.optimizer.zero_grad(set_to_none=True)

    def before(own: Callable[..., Any]) -> Callable[..., Any]:
        def scale(*args: Any, **kwargs: Any) -> Any:
            end()
            return own(*args, **kwargs)

        return scale

    def after(own: Callable[..., Any]) -> Callable[..., Any]:
        def update(*args: Any, **kwargs: Any) -> Any:
            result = own(*args, **kwargs)
            at.append(scheduler.last_epoch)
            return result

        return update

    scaler.scale, scaler.update = before(scaler.scale), after(scaler.update)
    try:
        yield
        end()
    finally:
        del scaler.scale, scaler.update


@seam(
    f"{BASE}._save_checkpoint_with_dcp",
    why="ROLL uploads when this returns",
    relies_on=("checkpoint_future",),
    **HERE,
)
def save(call: Call, checkpoint_dir: Any) -> Any:
    """Write the scaler's state beside the checkpoint, bound to the files that ROLL has written."""
    strategy = call.instance
    training = training_of(strategy) if hasattr(strategy, "scaler") else None
    if training is None:
        return call.proceed()
    make_missing_states(strategy.optimizer)
    result = call.proceed()
    place = os.path.dirname(checkpoint_dir)
    in_background = strategy.checkpoint_future is not None
    training.save(place, None if in_background else files_of_rank(place, written=True))
    return result


@seam(f"{BASE}._load_checkpoint_with_dcp", why="leaves the moments of a new job out", **HERE)
def load_states(call: Call, checkpoint_dir: Any) -> Any:
    """Make the moments of a new optimizer, because ROLL loads only into moments that exist."""
    strategy = call.instance
    training = training_of(strategy) if hasattr(strategy, "scaler") else None
    if training is not None and has_states(checkpoint_dir):
        make_missing_states(strategy.optimizer)
    return call.proceed()


@seam(f"{BASE}.load_checkpoint", why="knows the directory", **HERE)
def load(call: Call, load_dir: Any) -> Any:
    """Restore the scaler's state."""
    result = call.proceed()
    training = training_of(call.instance) if hasattr(call.instance, "scaler") else None
    if training is not None:
        training.restore(load_dir, files_of_rank(load_dir))
    return result
