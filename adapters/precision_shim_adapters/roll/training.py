"""ROLL on FSDP2 in fp16: keep fp32 parameters, end each scaled step, count skips, save the scaler.

With a GradScaler, ROLL's loop neither steps the LR scheduler nor clears the gradients. On a resume,
ROLL silently does not load the moments. ROLL keeps fp16 parameters, where AdamW's eps of 1e-8 is
zero.
Delete this module when ROLL keeps fp32 parameters, saves its scaler, and its loop ends the step.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from precision_shim.adapting import Call, seam
from precision_shim.adapting.dtypes import COMPUTES, REDUCES, Written
from precision_shim.adapting.scaling import SaveAside, ScalerSettings, files_of_rank

from ..torch_fp16 import FEATURE, ScaledTraining
from ..torch_fp16.states import make_missing_states
from ..torch_fp16.stepping import NormsInFp32, note_skip
from .checkpoints import FSDP2, has_states

GROUP = FSDP2
MODULE = "roll.distributed.strategy.fsdp2_strategy"
STRATEGY = f"{MODULE}:FSDP2TrainStrategy"
BASE = f"{MODULE}:FSDP2StrategyBase"
HERE: dict[str, Any] = {
    "feature": FEATURE,
    "group": GROUP,
    "optional": True,
    "delete_when": "ROLL keeps fp32 parameters, ends a scaled step as any other, saves its scaler",
}
OWN = "ROLL's own scaler, counted and kept with the checkpoints; AdamW updates fp32 parameters"


@seam(
    f"{STRATEGY}.initialize",
    why="loads the model, makes the scaler",
    relies_on=("model_provider", "scaler", "scheduler"),
    **HERE,
)
def make(call: Call, model_provider: Any) -> Any:
    """Load fp32 parameters; replace ROLL's scaler by one that skips on all ranks and is saved."""
    call.arguments["model_provider"] = _loading_fp32(model_provider)
    result = call.proceed()
    strategy = call.instance
    if type(strategy.scaler) is ShardedGradScaler:  # keep a user's subclass
        training = ScaledTraining.make(
            "roll",
            strategy.worker_config.name,
            device=next(strategy.model.parameters()).device.type,
            because=OWN,
            framework_default=ScalerSettings(),
            drives=False,
        ).keep(strategy, "scaler")
        training.guard(strategy, "train_step", lambda strategy: (strategy.optimizer,))
    return result


def _loading_fp32(own: Callable[..., Any]) -> Callable[..., Any]:
    """Let ROLL's function load an fp16 model in fp32; FSDP2 still computes in fp16.

    With LoRA the base model stays fp16, because peft by default keeps the adapters in fp32.
    """

    def provide(*, model_args: Any, **given: Any) -> Any:
        if model_args.compute_dtype is torch.float16 and model_args.lora_target is None:
            model_args = copy.copy(model_args)
            model_args.compute_dtype = torch.float32
        return own(model_args=model_args, **given)

    return provide


def written(strategy: Any) -> Iterator[Written]:
    """Yield the dtype keys that ROLL's config has for a model; bf16 is ROLL's default."""
    config, sharded = strategy.worker_config, hasattr(strategy, "param_dtype")
    dtype, keys = getattr(config.model_args, "dtype", None), config.strategy_args.strategy_config
    place = f"{config.name}.strategy_args.strategy_config"
    if dtype not in (None, "bf16"):
        # On FSDP2 ``param_dtype`` decides the dtype of computation.
        sets, needs = "params", ""
        if sharded and dtype != "fp32":
            sets, needs = COMPUTES, f"{place}.param_dtype={dtype}"
        yield Written(f"{config.name}.model_args.dtype", dtype, sets, needs)
    for key, sets in (("param_dtype", COMPUTES), ("reduce_dtype", REDUCES)):
        if sharded and keys.get(key) is not None:
            yield Written(f"{place}.{key}", keys[key], sets)


def training_of(strategy: Any) -> ScaledTraining | None:
    """A strategy's ``ScaledTraining``; ``None`` if the strategy's loss is not scaled."""
    name = strategy.worker_config.name
    return ScaledTraining.of_attribute(strategy, "scaler", "roll", name)


@seam(f"{STRATEGY}.train_step", why="leaves a scaled step unfinished", **HERE)
def step(call: Call) -> Any:
    """Step the scheduler after scaled steps; report scale, skips, and a skipped step's norm NaN."""
    strategy = call.instance
    training = training_of(strategy)
    if training is None:
        return call.proceed()
    with _ended(strategy, training):
        found = call.proceed()
    name = strategy.worker_config.name
    key = f"{name}/grad_norm"
    if key in found:  # a call that only accumulates gradients returns no norm
        found[key] = training.norm(found[key])
    return {**found, **training.metrics(f"{name}/")}


@seam(f"{STRATEGY}._clip_grad_norm", why="takes the norm of fp16 adapters in fp16", **HERE)
def clip(call: Call) -> Any:
    """Compute the gradients' norm in fp32."""
    with NormsInFp32():
        return call.proceed()


@contextmanager
def _ended(strategy: Any, training: ScaledTraining) -> Iterator[None]:
    """Step the scheduler and clear the gradients after a scaled step, unless ROLL does so.

    ``scaler.update`` stores ``scheduler.last_epoch``. If ``last_epoch`` has the stored value when
    ROLL scales the next loss or ends ``train_step``, ROLL has not stepped the scheduler.
    """
    scaler, scheduler = strategy.scaler, strategy.scheduler
    own_scale, own_update = scaler.scale, scaler.update
    at: list[int] = []

    def end() -> None:
        if at and scheduler.last_epoch == at.pop():
            if training.skipped:
                note_skip(strategy.optimizer, ())
            scheduler.step()
            strategy.optimizer.zero_grad(set_to_none=True)

    def scale(*args: Any, **kwargs: Any) -> Any:
        end()
        return own_scale(*args, **kwargs)

    def update(*args: Any, **kwargs: Any) -> Any:
        result = own_update(*args, **kwargs)
        at.append(scheduler.last_epoch)
        return result

    scaler.scale, scaler.update = scale, update
    try:
        yield
        end()
    finally:
        del scaler.scale, scaler.update


@seam(
    f"{BASE}._save_checkpoint_with_dcp",
    why="ROLL uploads when this returns",
    relies_on=("checkpoint_future", "async_save_strategy", "_get_dcp_process_group"),
    **HERE,
)
def save(call: Call, checkpoint_dir: Any, is_last_step: Any) -> Any:
    """Save the scaler's state, and a list of ROLL's checkpoint files, beside the checkpoint."""
    strategy = call.instance
    training = training_of(strategy)
    if training is None:
        return call.proceed()
    make_missing_states(strategy.optimizer)
    place = os.path.dirname(checkpoint_dir)
    places = {f"{os.path.basename(checkpoint_dir)}/": checkpoint_dir}
    if is_last_step or not strategy.async_save_strategy:
        with training.saved_aside(place, places) as aside:
            (call.arguments["checkpoint_dir"],) = aside.values()
            return call.proceed()
    save_aside = SaveAside(places)
    (call.arguments["checkpoint_dir"],) = save_aside.places.values()
    result = call.proceed()
    group = strategy._get_dcp_process_group()  # ROLL waits for this save before the next
    future = training.save_after(strategy.checkpoint_future, place, save_aside, group)
    strategy.checkpoint_future = future
    return result


@seam(f"{BASE}._load_checkpoint_with_dcp", why="leaves the moments of a new job out", **HERE)
def load_states(call: Call, checkpoint_dir: Any) -> Any:
    """Make the moments of a new optimizer, because ROLL loads only into existing moments."""
    strategy = call.instance
    training = training_of(strategy)
    if training is not None and has_states(checkpoint_dir):
        make_missing_states(strategy.optimizer)
    return call.proceed()


@seam(f"{BASE}.load_checkpoint", why="knows the directory", **HERE)
def load(call: Call, load_dir: Any) -> Any:
    """Restore the scaler's state."""
    result = call.proceed()
    training = training_of(call.instance)
    if training is not None:
        training.restore(load_dir, files_of_rank({"": load_dir}))
    return result
