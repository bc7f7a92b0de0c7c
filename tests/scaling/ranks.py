"""What each rank runs in the tests of loss scaling; ``processes/rank_server.py`` starts the ranks.

A case returns what its test compares, with tensors as bits.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from precision_shim.errors import ScalerCheckpointError
from precision_shim.scaling import (
    FILE_NAME,
    LossScaler,
    SaveAside,
    ScalerSettings,
    files_of_rank,
    load,
    record_of,
    restore,
    save,
)
from precision_shim_adapters.torch_fp16 import ScaledTraining

from .hand_written import Loop

OVERFLOWS = (4, 15)
"""Steps that overflow, one in each half of the twenty steps."""

# The scale is so high that a fresh scaler would overflow again for some steps. The interval is so
# short that the scale grows in both halves.
SETTINGS = ScalerSettings(init_scale=2.0**22, growth_interval=3)


class Job:
    """A tiny model under FSDP2: fp32 parameters, fp16 in forward and backward, fp32 reduction."""

    def __init__(self, settings=SETTINGS):
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16)
        )
        policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scaler = LossScaler(settings, device="cpu")
        self.losses, self.scales = [], []

    def forward_backward(self, step, weights=(1.0, 1.0)):
        """Run two micro-batches of this rank's own data."""
        self.optimizer.zero_grad()
        for micro, weight in enumerate(weights):
            generator = torch.Generator().manual_seed(1000 * step + 10 * dist.get_rank() + micro)
            batch = torch.randn(8, 16, generator=generator)
            loss = (self.model(batch).float() - batch).square().mean() / len(weights)
            self.losses.append(loss.item())
            loss = loss * weight
            self.scaler.attach(loss)
            loss.backward()

    def optimizer_step(self):
        self.scaler.unscale_once(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scales.append(self.scaler.get_scale())
        return norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item()

    def train(self, steps):
        for step in steps:
            # Only the last rank overflows.
            last = dist.get_rank() == dist.get_world_size() - 1
            weight = 1e30 if step in OVERFLOWS and last else 1.0
            self.forward_backward(step, (1.0, weight))
            self.optimizer_step()

    def save(self, directory):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=directory / "torch")

    def load(self, directory):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=directory / "torch")
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def result(self):
        return {
            "parameters": [bits(parameter) for parameter in self.model.parameters()],
            "states": [
                [bits(value) for _, value in sorted(self.optimizer.state[parameter].items())]
                for parameter in self.model.parameters()
            ],
            "norm": sum(
                local(one).double().square().sum().item() for one in self.model.parameters()
            ),
            "scale": self.scaler.get_scale(),
            "growth_tracker": self.scaler._get_growth_tracker(),
            "counter": dict(vars(self.scaler.counter)),
            "losses": self.losses,
            "scales": self.scales,
        }


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bits(tensor):
    return local(tensor.detach()).reshape(-1).view(torch.uint8).tolist()


# -- cases -----------------------------------------------------------------------------------


def first_half(directory):
    """Train 20 steps; train 10 and save; resume in the same process and train 10 more."""
    straight = Job()
    straight.train(range(20))
    halves = Job()
    halves.train(range(10))
    before = halves.result()
    halves.save(directory)
    save(directory, halves.scaler)
    after = halves.result()
    again = Job()
    again.train(range(3))  # this process already trained something else
    again.load(directory)
    load(directory, again.scaler)
    again.losses, again.scales = [], []
    again.train(range(10, 20))
    return {
        "straight": straight.result(),
        "saving moved nothing": before == after,
        "same process": again.result(),
    }


def second_half(directory):
    """Train 10 more steps from the checkpoint in a new process."""
    resumed = Job()
    resumed.load(directory)
    loaded = resumed.result()
    load(directory, resumed.scaler)
    resumed.train(range(10, 20))
    return {"resumed": resumed.result(), "loaded": loaded}


def groups(directory):
    """One rank of a 2 x 2 mesh overflows; the scaler's process group determines who skips."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = {}
    for name, group in (("world", None), ("tp", mesh.get_group("tp"))):
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        scaler = LossScaler(ScalerSettings(init_scale=16.0), device="cpu", process_group=group)
        loss = (parameter * (float("inf") if dist.get_rank() == 3 else 1.0)).sum()
        scaler.attach(loss)
        loss.backward()
        scaler.step(optimizer)
        scaler.update()
        found[name] = {"scale": scaler.get_scale(), "skipped": scaler.counter.skipped}
    # A parameter that is sharded over tensor-parallel ranks, as in models with TP or CP.
    weight = distribute_tensor(torch.ones(4, 2), mesh["tp"], [Shard(0)])
    parameter = torch.nn.Parameter(weight)
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scaler = LossScaler(ScalerSettings(init_scale=16.0), device="cpu")
    loss = (parameter.to_local() * (float("inf") if dist.get_rank() == 3 else 1.0)).sum()
    scaler.attach(loss)
    loss.backward()
    scaler.step(optimizer)
    scaler.update()
    found["sharded"] = {"scale": scaler.get_scale(), "skipped": scaler.counter.skipped}
    found["parameter"] = bits(parameter) == bits(weight)
    return found


def offloaded(directory):
    """Gradients on the CPU, some of them no DTensors; their mesh has a backend for GPUs only."""
    gpus = dist.new_group(backend="cuda:gloo")
    mesh = DeviceMesh.from_group(gpus, "cpu", mesh=list(range(dist.get_world_size())))
    sharded = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False)
    parameters = [torch.nn.Parameter(sharded), torch.nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.SGD(parameters, lr=0.5, foreach=False)
    scaler = LossScaler(ScalerSettings(init_scale=16.0), device="cpu")
    found = []
    for weight in (float("inf") if dist.get_rank() else 1.0, 1.0):
        optimizer.zero_grad()
        loss = weight * parameters[0].to_local().sum() + parameters[1].sum()
        scaler.attach(loss)
        loss.backward()
        scaler.step(optimizer)
        scaler.update()
        values = [local(one.detach()).unique().tolist() for one in parameters]
        found.append([scaler.counter.skipped, scaler.get_scale(), values])
    return found


def faults(directory):
    """An error on one rank is raised on all ranks, and all end with the same scale."""
    rank = dist.get_rank()
    found = {}

    def attempt(name, call):
        try:
            found[name] = [call(), None]
        except ScalerCheckpointError as error:
            found[name] = [None, str(error)]

    def fresh():
        return LossScaler(ScalerSettings(init_scale=2.0 ** (10 + rank)), device="cpu")

    # Ranks whose scales differ (by some bug) have one scale again after a load.
    attempt("save", lambda: str(save(directory, fresh())))
    scaler = fresh()
    attempt("load", lambda: load(directory, scaler))
    found["scale"] = scaler.get_scale()
    # A node-local path: the directory does not exist on rank 1, which needs none.
    mine = directory if rank == 0 else directory / "not there"
    scaler = fresh()
    attempt("node-local", lambda: load(mine, scaler))
    found["node-local scale"] = scaler.get_scale()
    attempt("missing", lambda: load(directory / "nothing", fresh()))
    blocked = directory / "a file"
    if rank == 0:
        blocked.write_text("in the way")
    dist.barrier()
    attempt("cannot save", lambda: str(save(blocked / "inside", fresh())))
    if rank == 0:
        path = directory / "precision_shim_scaler.json"
        path.write_bytes(path.read_bytes()[:-40])
    dist.barrier()
    scaler = fresh()
    attempt("truncated", lambda: load(directory, scaler))
    found["untouched"] = scaler.get_scale() == 2.0 ** (10 + rank)
    return found


def agreement(directory):
    """Let every rank read its own record, and compare the records."""
    rank = dist.get_rank()
    scaler = LossScaler(ScalerSettings(init_scale=8.0), device="cpu")
    same = record_of(scaler)
    other = record_of(LossScaler(ScalerSettings(init_scale=2.0**rank), device="cpu"))

    def ended(record):
        try:
            restore(scaler, record, "here")
        except ScalerCheckpointError as error:
            return str(error)
        return None

    return {
        "same": ended(same),
        "none": ended(None),
        "other": ended(other),
        "digest": other["digest"],
        "missing": ended(same if rank == 0 else None),
        "damaged": ended(same if rank == 0 else {**same, "world_size": 7}),
    }


def in_a_group(directory):
    """All ranks but rank 0 save; rank 1 is the group's first rank, and writes."""
    ranks = list(range(1, dist.get_world_size()))
    group, rank = dist.new_group(ranks), dist.get_rank()
    if rank not in ranks:
        return None
    # Node-local paths: the directory does not exist on the other ranks.
    mine = directory if rank == ranks[0] else directory / "not there"
    scaler = LossScaler(ScalerSettings(init_scale=2.0**rank), device="cpu")
    save(mine, scaler, group)
    dist.barrier(group)
    try:
        save(directory / "taken" if rank == ranks[0] else mine, scaler, group)
        told = ""
    except ScalerCheckpointError as error:
        told = str(error)
    return {"told": told}


def in_background(directory):
    """Save in the background, and train on with collectives meanwhile; returns the record."""
    job, group = Job(), dist.new_group(backend="gloo")
    job.train(range(3))
    training = ScaledTraining("tests", "model", job.scaler)
    scale = job.scaler.get_scale()
    aside = SaveAside({"dcp/": directory / "dcp"})
    saved = dcp.async_save(
        {"model": job.model.state_dict()}, checkpoint_id=aside.places["dcp/"], process_group=group
    )
    saved = training.save_after(saved, str(directory), aside, group)
    job.train(range(3, 6))
    saved.result()
    assert job.scaler.get_scale() != scale
    dist.barrier()
    other = LossScaler(SETTINGS, device="cpu")
    lines = load(directory, other, files=files_of_rank({"": str(directory)}))
    assert other.get_scale() == scale
    return {
        "files": sorted(json.loads((directory / FILE_NAME).read_text())["files"]),
        "said": lines,
    }


def nan_on_one_rank(directory):
    """One NaN micro-batch on rank 1, then only NaN micro-batches."""
    job = Job(ScalerSettings(init_scale=256.0))
    job.train(range(2))
    weights = (1.0, float("nan")) if dist.get_rank() == 1 else (1.0, 1.0)
    before = [bits(parameter) for parameter in job.model.parameters()]
    job.forward_backward(2, weights)
    norm = job.optimizer_step()
    after = [bits(parameter) for parameter in job.model.parameters()]
    told = None
    for step in range(3, 40):
        job.forward_backward(step, weights)
        try:
            job.optimizer_step()
        except RuntimeError as error:
            told = f"{type(error).__name__}: {error}"
            break
    return {
        "unchanged": before == after,
        "norm is nan": norm != norm,
        "ended at": step,
        "told": told,
        "scale": job.scaler.get_scale(),
    }


def owns_nothing(directory):
    """FSDP1 where rank 0's shard has no trainable element, as with a tiny LoRA adapter."""
    torch.manual_seed(7)
    frozen, trained = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 1, bias=False)
    frozen.requires_grad_(requires_grad=False)
    model = FullyShardedDataParallel(
        torch.nn.Sequential(frozen, trained), use_orig_params=True, device_id=torch.device("cpu")
    )
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.1)
    settings = {"init_scale": 16.0, "growth_interval": 1}
    training = ScaledTraining.make("verl", "actor", device="cpu", because="", configured=settings)
    seen = []
    for weight in (1.0, math.inf, 1.0):
        optimizer.zero_grad()
        loss = (model(torch.ones(2, 8)) * weight).mean()
        training.attach(loss)
        loss.backward()
        owned = sum(one.numel() for one in optimizer.param_groups[0]["params"])
        with training.one_step(optimizer):
            norm = model.clip_grad_norm_(1.0)
            optimizer.step()
        norm = float(training.norm(norm))
        seen.append((owned, training.metrics(), training.scaler.get_scale(), math.isfinite(norm)))
    return seen


def overhead(directory):
    """Compare our loop with the one that uses torch's scaler by hand."""
    by_hand, ours = Loop(ours=False), Loop(ours=True)
    counts = {}
    for name, weight in (("step", 1.0), ("overflow", 1e38)):
        counts[name] = [by_hand.count(weight), ours.count(weight)]
    for loop in (by_hand, ours):
        loop.step()
    equal = all(
        bits(one) == bits(other)
        for one, other in zip(by_hand.model.parameters(), ours.model.parameters(), strict=True)
    )
    return {"counts": counts, "equal": equal}


def prepare():
    """Do nothing: this module has imported all that its ranks need."""


def run(launch):
    """Run the launch's case in this rank."""
    torch.use_deterministic_algorithms(mode=True)
    if launch.case == "marked":
        return marked(launch)
    with launch.joined():
        return globals()[launch.case](Path(launch.folder))


def join_by_tcp(launch):
    """Make the ranks one process group whose store is a server on rank 0."""
    port, where = Path(f"{launch.store}-port"), ("127.0.0.1", 0)
    if launch.rank == 0:
        store = dist.TCPStore(*where, launch.world, True, wait_for_workers=False)
        port.with_suffix(".new").write_text(str(store.port))
        port.with_suffix(".new").rename(port)
    else:
        while not port.exists():
            time.sleep(0.01)
        store = dist.TCPStore(where[0], int(port.read_text()), launch.world, False)
    dist.init_process_group("gloo", store=store, rank=launch.rank, world_size=launch.world)


def marked(launch):
    """Unscale on each rank that has the shim; returns the error, or ``""``.

    ``given``: each rank's settings, version and whether it has the shim; ``group``: the scaler's;
    ``tcp``: whether the default group's store is a server on rank 0, not a file.
    """
    import precision_shim
    from precision_shim.errors import PartialInstallationError
    from precision_shim.process import marks

    marks.PATIENCE = 0.5
    given = launch.options["given"][launch.rank]
    marks.__version__ = given.get("version", "1.0")
    late = launch.options.get("late") == launch.rank
    install = {"settings": given.get("settings", {}), "export": False}
    if given["on"] and not late:
        precision_shim.install(**install)
    found = []
    for turn in range(2):
        here = launch if not turn else replace(launch, store=f"{launch.store}-2")
        if launch.options.get("tcp"):
            join_by_tcp(here)
        else:
            here.join()
        if given["on"] and late and not turn:
            precision_shim.install(**install)
        ranks = launch.options.get("group", list(range(launch.world)))
        group = dist.new_group(ranks)
        if given["on"] and launch.rank in ranks:
            parameter = torch.nn.Parameter(torch.ones(1))
            optimizer = torch.optim.SGD([parameter], lr=0.1)
            scaler = LossScaler(SETTINGS, device="cpu", process_group=group)
            scaler.attach(parameter.sum())
            parameter.grad = torch.ones(1)
            try:
                scaler.unscale_(optimizer)
                found.append("")
            except PartialInstallationError as error:
                found.append(str(error))
        dist.barrier()
        dist.destroy_process_group()
    return found
