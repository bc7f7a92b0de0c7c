"""The rank processes that train, save and resume; ``tests/processes/rank_server.py`` starts them.

The case is ``policy`` or ``pretrain``. Options of a launch:
    on: whether the shim is installed.
    only: the only rank that has the shim, if not all have it.
    first, last: range of the steps that this process takes, numbered over the whole job.
    overflows: the steps in which rank ``on_rank`` (default: the last) has an overflow.
    load, save: whether the rank loads a checkpoint before training, and saves one after.
    dtype, experts, chunks, layers, training, parallelism, checkpoint: as in ``cpu``.
    push, generator: whether the rank sends its weights at the end, and in which dtype.
"""

from __future__ import annotations

import hashlib
import importlib
from typing import Any

from ..processes import forks
from ..processes.rank_server import Launch
from . import cpu

SETTINGS = {"growth_interval": 2, "loss_scale_init": 1024, "log": "quiet"}


def prepare() -> None:
    """Import in the server, except Monarch: its import starts threads, which a fork would lose.

    Each rank installs the shim itself, after the server's imports.
    """
    cpu.answer_for_gpus()
    for name in ("torchtitan.trainer", "torchtitan.models.qwen3", "tests.torchtitan.data"):
        importlib.import_module(name)


def run(launch: Launch) -> Any:
    """Build a trainer, load, train, save; returns the results."""
    if launch.case in ("module", "script", "tests"):
        return getattr(forks, launch.case)(launch)

    import precision_shim
    from precision_shim.errors import PrecisionShimError

    from ..every_framework.shim_warnings import ours  # it imports the shim

    given = dict(launch.options)
    only = given.get("only")
    theirs = _theirs()
    if only is not None:
        from precision_shim.process import marks

        marks.PATIENCE = 1.0
        theirs += (RuntimeError,)  # the other rank has left
    if given.get("on", True) and only in (None, launch.rank):
        precision_shim.install(settings={**SETTINGS, **given.get("settings", {})})
    cpu.enter(launch.world, launch.rank, launch.store)
    with ours() as warned:
        try:
            found = _train(launch, given)
        except (PrecisionShimError, *theirs) as error:
            found = {"error": f"{type(error).__name__}: {error}"}
    found["warned"] = warned
    found["decisions"] = [one.chosen for one in precision_shim.status().decisions]
    return found


def _theirs() -> tuple[type[BaseException], ...]:
    from torch.distributed.checkpoint.api import CheckpointException

    return (CheckpointException,)


def _train(launch: Launch, given: dict[str, Any]) -> dict[str, Any]:
    changes = {
        name: given[name]
        for name in ("experts", "chunks", "layers", "training", "parallelism", "compile")
        if name in given
    }
    save, load = given.get("save", False), given.get("load", False)
    changes["checkpoint"] = {
        "enable": save or load,
        "last_save_model_only": False,
        **given.get("checkpoint", {}),
    }
    build = cpu.policy_trainer if launch.case == "policy" else cpu.pretrainer
    if "generator" in given:
        changes["generator_dtype"] = given["generator"]
    trainer = build(launch.folder, given.get("dtype", "float16"), **changes)
    _sum_over_gloo(trainer)
    if load and launch.case != "policy":  # PolicyTrainer loads within __init__
        trainer.checkpointer.load()
    overflows = given.get("overflows", [])
    mine = launch.rank == given.get("on_rank", launch.world - 1)
    steps = range(given["first"], given["last"])
    step = _policy if launch.case == "policy" else _pretrain(trainer, launch.case)
    found: dict[str, Any] = {"metrics": []}
    for number in steps:
        found["metrics"].append(step(trainer, number, mine and number in overflows))
    if save:
        trainer.checkpointer.save(given["last"])
        trainer.checkpointer.maybe_wait_for_saving()
    values = cpu.values(trainer)
    found["values"] = {name: _digest(one) for name, one in values.items()}
    found["finite"] = all(bool(one.isfinite().all()) for one in values.values())
    if given.get("push"):
        found |= _pushed(trainer, given["generator"])
    found["state"] = {
        name: value
        for name, value in trainer.state_dict().items()
        if name != "precision_shim_scaler"
    }
    found["rates"] = trainer.lr_schedulers.state_dict()["last_epoch"]
    training = getattr(trainer, "_precision_shim_training", None)
    if training is not None:
        scaler = training.scaler
        found["scaler"] = [
            scaler.get_scale(),
            int(scaler._get_growth_tracker()),
            scaler.counter.steps,
            scaler.counter.skipped,
            scaler.counter.in_row,
        ]
    return found


def _pushed(trainer: Any, dtype: str) -> dict[str, Any]:
    """Digests of this rank's share of the sent weights, and of its own weights, rounded once."""
    from types import SimpleNamespace

    import torch
    from torchtitan.experiments.rl.actors import trainer as module

    sent: dict[str, Any] = {}

    async def put_state_dict(state_dict: Any, key: str, **options: Any) -> None:
        sent.update(state_dict)

    module.ts = SimpleNamespace(put_state_dict=put_state_dict)
    cpu.endpoint(trainer, "push_model_state_dict")
    held = {name: one.to(getattr(torch, dtype)) for name, one in trainer.model.state_dict().items()}
    return {
        "pushed": {name: _digest(cpu.local(one)) for name, one in sent.items()},
        "rounded": {name: _digest(cpu.local(one)) for name, one in held.items()},
    }


def _digest(tensor: Any) -> str:
    import torch

    text = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(text).hexdigest()[:16]


def _sum_over_gloo(trainer: Any) -> None:
    """Let FSDP reduce by a plain sum, because gloo lacks NCCL's reduction with a factor."""
    from torch.distributed.fsdp import FSDPModule

    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def _policy(trainer: Any, number: int, overflow: bool) -> dict[str, Any]:
    for part in range(3):
        data = [
            cpu.microbatch(
                1000 * number + 10 * part + rank,
                advantage=1e9 if overflow and rank == trainer.dp_rank else 1.0,
            )
            for rank in range(trainer.dp_size)
        ]
        tokens = 3 * 2 * cpu.LENGTH * trainer.dp_size
        losses = cpu.endpoint(trainer, "forward_backward", data, tokens)
    output = cpu.endpoint(trainer, "optim_step")
    return {"loss": repr(losses["loss/mean"])} | {
        name: repr(value) for name, value in output.metrics.items()
    }


def _pretrain(trainer: Any, case: str) -> Any:
    from .test_pretraining import Overflows

    logged: list[dict[str, Any]] = []
    trainer.metrics_processor.logger.log = lambda metrics, step: logged.append(dict(metrics))
    data = trainer.batch_generator(trainer.dataloader)
    wanted = ("grad_norm", "loss_scale", "skipped_steps", "loss_metrics/global_avg_loss")
    beneath = None
    schedule = getattr(trainer, "pp_schedule", None)

    def loss_overflows(on: bool) -> None:
        nonlocal beneath
        if beneath is None:
            beneath = Overflows.beneath(trainer, schedule)
        if beneath is not None:
            beneath.on = on

    def step(trainer: Any, number: int, overflow: bool) -> dict[str, Any]:
        loss_overflows(overflow)
        trainer.step += 1
        trainer.train_step(data)
        return {name: repr(logged[-1][name]) for name in wanted if name in logged[-1]}

    return step
