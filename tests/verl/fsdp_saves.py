"""Cases of the ranks in ``fsdp_ranks.py``: killed saves, and scaler records of another save."""

from __future__ import annotations

import hashlib
import random
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import precision_shim
from precision_shim.errors import CheckpointUnreadableError

from ..every_framework.checkpoint_doctor import FP16, verdict
from ..processes.kill_points import beside_another_job, content_of, kill_points, killed_at
from . import fsdp_support as support
from .fsdp_ranks import GROWING, Job, case, install, ours


def whole_state(one: Any) -> dict[str, Any]:
    """All states of an engine that verl and the shim save."""
    return {
        **support.engine_state(one),
        "rate": one.lr_scheduler.state_dict()["last_epoch"],
        "random": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
    }


def disturb(one: Any) -> None:
    """Change an engine's state so that it equals no checkpoint's."""
    with torch.no_grad():
        for parameter in one.module.parameters():
            support.local(parameter).add_(1)
        for state in one.optimizer.state.values():
            for value in state.values():
                support.local(value).add_(1)
    one.scaler.counter.steps += 1000
    one.lr_scheduler.last_epoch += 1000
    torch.manual_seed(99)


def everywhere(value: Any) -> list[Any]:
    """The values of all ranks."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def readable(place: Path) -> bool:
    """Whether torch can read all ranks' files; if not, verl's load fails on one rank alone."""
    for what in ("model", "optim", "extra_state"):
        for rank in range(dist.get_world_size()):
            name = f"{what}_world_size_{dist.get_world_size()}_rank_{rank}.pt"
            try:
                torch.load(place / name, weights_only=False)
            except Exception:
                return False
    return True


def resume(one: Any, place: Path, states: dict[str, Any]) -> dict[str, Any]:
    """The outcome of a resume on this rank, and the doctor's verdict before it."""
    try:
        predicted = verdict(place, "verl", FP16)
    except CheckpointUnreadableError:
        predicted = "unreadable"
    found = {"point": place.name, "predicted": predicted, "said": []}
    if not readable(place):
        return {**found, "outcome": "refused by verl"}
    disturb(one)
    with ours() as said:
        one.load_checkpoint(str(place), del_local_after_load=False)
    state = whole_state(one)
    names = [name for name, one in states.items() if one == state]
    return {**found, "outcome": names[0] if names else "mixed", "said": said}


def two_states(job: Job, target: Path, over: bool) -> tuple[Any, dict[str, Any]]:
    """Train an engine to a first state, which is saved if ``over`` is true, and to a second."""
    random.seed(7)  # verl saves Python's random state, which would differ between forks
    one = support.engine(job.model)
    support.train(one, range(4), (1,))
    states = {}
    if over:
        one.save_checkpoint(str(target), global_step=1)
        states["old"] = whole_state(one)
    support.train(one, range(4, 7), (5,))
    states["new"] = whole_state(one)
    return one, states


@case
def ended_early(job: Job, over: bool) -> dict[str, Any]:
    """Copy the directory before each file operation of a save, and resume from each copy."""
    install(**GROWING)
    target, copies = Path(job.path("target")), Path(job.path("points"))
    one, states = two_states(job, target, over)
    dist.barrier()
    with kill_points(target, copies, dist.get_rank()) as mine:
        one.save_checkpoint(str(target), global_step=2)
    points = sorted(place for places in everywhere(mine) for place in places)
    two = support.engine(job.model)
    support.train(two, range(2))
    return {
        "outcomes": [resume(two, place, states) for place in points],
        "contents": {place.name: content_of(place) for place in mine},
    }


@case
def beside(job: Job) -> dict[str, Any]:
    """Let another job's save end before each file operation of a save, and resume from each."""
    install(**GROWING)
    target, other = Path(job.path("target")), Path(job.path("other"))
    one, states = two_states(job, other, over=True)
    two = support.engine(job.model)
    support.train(two, range(2))
    saves = beside_another_job(
        target, other, lambda: one.save_checkpoint(str(target), global_step=2)
    )
    outcomes = [resume(two, place, states) for place in saves]
    return {"outcomes": outcomes}


@case
def ended(job: Job, content: str) -> dict[str, Any]:
    """Repeat the save of ``ended_early``, and kill this process at a file operation."""
    install(**GROWING)
    target = Path(job.path("target"))
    one, _ = two_states(job, target, over=False)
    with killed_at(target, content):
        one.save_checkpoint(str(target), global_step=2)
    return {}


@case
def saved_again(job: Job, copied: bool) -> dict[str, Any]:
    """Save in fp16, then copy the directory, or save again into it, in bfloat16."""
    found: dict[str, Any] = {}
    install(**GROWING)
    one = support.engine(job.model)
    support.train(one, range(4), (1,))
    place = job.path("place")
    one.save_checkpoint(place, global_step=1)
    first = whole_state(one)
    if not copied:
        one = support.engine(job.model, param_dtype="bf16")
        support.train(one, range(4, 5))
        one.save_checkpoint(place, global_step=2)
    else:
        if dist.get_rank() == 0:
            shutil.move(place, job.path("moved"))
            shutil.copytree(job.path("moved"), job.path("copy"), copy_function=shutil.copyfile)
        dist.barrier()
        place = job.path("copy")
    install(**GROWING)
    found["predicted"] = verdict(place, "verl", FP16)
    two = support.engine(job.model)
    with ours() as said:
        two.load_checkpoint(place, del_local_after_load=False)
    found |= {"first": first, "loaded": whole_state(two), "said": said}
    precision_shim.uninstall()
    precision_shim.install(settings=GROWING, strict=True)
    found["foretold_strict"] = verdict(place, "verl", FP16)
    three = support.engine(job.model)
    try:
        three.load_checkpoint(place, del_local_after_load=False)
        found["strict"] = ""
    except precision_shim.PrecisionShimError as error:
        found["strict"] = f"{type(error).__name__}: {error}"
    return found


@case
def legacy_saved_again(job: Job) -> dict[str, Any]:
    """Save a legacy worker with the shim, then again without it, and load."""
    install(**GROWING)
    one = support.Legacy(job.model)
    one.train(range(4), (1,))
    one.worker.save_checkpoint(job.path("place"), global_step=1)
    precision_shim.uninstall()
    two = support.Legacy(job.model)
    two.train(range(1))
    two.worker.save_checkpoint(job.path("place"), global_step=2)
    install(**GROWING)
    three = support.Legacy(job.model)
    with ours() as said:
        three.worker.load_checkpoint(job.path("place"), del_local_after_load=False)
    return {"loaded": three.state(), "said": said}
