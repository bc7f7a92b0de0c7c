"""What each rank runs in the audit's tests; ``tests/processes/rank_server.py`` starts the ranks."""

from __future__ import annotations

import atexit
import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import precision_shim
from precision_shim.auditing import meters
from precision_shim.scaling import LossScaler
from precision_shim_tools.testing.measure import measure_bytes

from ..processes.rank_server import Launch
from . import builds


def prepare() -> None:
    """Import Megatron for the ranks; the unit environments have no Megatron."""
    torch.set_num_threads(1)  # the ranks are forked, and inherit it
    warnings.simplefilter("ignore")
    try:
        import megatron.core.models.gpt
        import megatron.core.optimizer  # noqa: F401
    except ImportError:
        return


# -- Megatron --------------------------------------------------------------------------------------


@contextmanager
def on_megatron(launch: Launch, **parallel: Any) -> Iterator[None]:
    """Be one rank of Megatron's, with a stand-in for TransformerEngine."""
    from precision_shim_tools.testing import (
        megatron_on_cpu,
        model_parallel,
        stand_in_transformer_engine,
    )

    with (
        stand_in_transformer_engine(),
        megatron_on_cpu(),
        model_parallel(launch.world, launch.rank, launch.store, **parallel),
    ):
        yield


def megatron(launch: Launch) -> dict[str, Any]:
    """Audit honest and planted builds: dense, and with a data-parallel group for experts."""
    found: dict[str, Any] = {"honest": {}, "planted": {}, "held": {}, "measured": {}}
    with on_megatron(launch, expert_model_parallel_size=2):
        for experts in (False, True):
            kind = "experts" if experts else "dense"
            for name in ("bf16, as Megatron has it", "precision-aware", "fp16"):
                made = builds.make(builds.with_experts(builds.HONEST[name], experts))
                before = precision_shim.audit(*made)
                # gloo cannot exchange tokens between the ranks of the experts.
                builds.step_without_forward(*made)
                after = precision_shim.audit(*made, group=dist.group.WORLD)
                found["honest"][f"{kind}: {name}"] = [before.to_dict(), after.to_dict()]
            found["measured"][kind] = dict(measure_bytes(*made).data_parallel_sizes)
            for name, build in builds.PLANTED.items():
                made = builds.make(builds.with_experts(build, experts))
                builds.plant(name, made[1])
                audit = precision_shim.audit(*made)
                found["planted"][f"{kind}: {name}"] = audit.to_dict()
            for name, build in builds.EIGHT.items():
                held, *made = builds.held_by(builds.with_experts(build, experts))
                found["held"][f"{kind}: {name}"] = [held, precision_shim.audit(*made).to_dict()]
    return found


def offloaded(launch: Launch) -> dict[str, Any]:
    """Resume an optimizer with half of it on the CPU; compare each rank's part of the states."""
    import verl  # noqa: F401  # importing the framework loads the adapter

    from ..stand_ins.fake_gpu import FakeGpu
    from ..testing import tiny_training
    from .offloading import READABLE, offloading, same_stepped, stepped

    def train(made: Any, steps: int, first: int) -> list[float]:
        return builds.train(*made, steps, first=first, world=launch.world, rank=launch.rank)

    found: dict[str, Any] = {}
    with on_megatron(launch), FakeGpu():
        precision_shim.install(export=False)
        for sharding in READABLE:
            folder = Path(launch.folder, sharding)
            first = builds.make(offloading(0.5))
            train(first, 3, 0)
            tiny_training.save(*first, folder, sharding)
            saved = stepped(first[1])
            second = builds.make(offloading(0.5), seed=1)
            tiny_training.load(*second, folder)
            loaded = same_stepped(stepped(second[1]), saved)
            straight = train(first, 2, 3)
            goes_on = train(second, 2, 3) == straight
            found[sharding] = [
                loaded,
                goes_on and same_stepped(stepped(second[1]), stepped(first[1])),
            ]
    return found


def differing(launch: Launch) -> list[Any]:
    """Audit ranks of which the last stores whole masters and the others store remainders."""
    last = launch.rank == launch.world - 1
    with on_megatron(launch):
        build = builds.HONEST["precision-aware, whole masters" if last else "precision-aware"]
        made = builds.make(build)
        audit = precision_shim.audit(*made, group=dist.group.WORLD)
        return [audit.to_dict(), audit.ok]


def failing(launch: Launch) -> list[str]:
    """One rank passes a wrong object as optimizer; then one audits in a group that excludes it."""
    launch.join()
    model = torch.nn.Linear(2, 2)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    alone = dist.new_group([0])
    last = launch.rank == launch.world - 1

    def asked(given: Any, group: Any) -> str:
        try:
            precision_shim.audit(model, given, group=group)
        except precision_shim.AuditError as error:
            return str(error)
        return ""

    return [asked("adam" if last else optimizer, dist.group.WORLD), asked(optimizer, alone)]


def ended(launch: Launch) -> None:
    """Run some code, and what Python runs at the end of a process."""
    exec(launch.options["code"], {})
    atexit._run_exitfuncs()


# -- FSDP2 -----------------------------------------------------------------------------------------


def fsdp_model(dtype: torch.dtype, launch: Launch, *, frozen: bool = True) -> Any:
    """Two layers of which FSDP2's shares are unequal; ``frozen``: one bias is."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(7)
    # 15 and 3 rows over two ranks make unequal shares.
    model = torch.nn.Sequential(torch.nn.Linear(8, 15), torch.nn.GELU(), torch.nn.Linear(15, 3)).to(
        dtype
    )
    model[0].bias.requires_grad_(not frozen)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if dtype is torch.float32 else dtype)
    mesh = init_device_mesh("cpu", (launch.world,))
    fully_shard(model[0], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def fsdp_step(model: Any, optimizer: Any, dtype: torch.dtype) -> None:
    """Take a step."""
    model(torch.ones(2, 8, dtype=dtype)).float().sum().backward()
    optimizer.step()


def fsdp(launch: Launch) -> dict[str, Any]:
    """Audit FSDP2 with torch's AdamW in fp32, bf16, and fp16 with and without a scaler."""
    launch.join()
    found: dict[str, Any] = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        model = fsdp_model(dtype, launch)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3)
        before = precision_shim.audit(model, optimizer)
        fsdp_step(model, optimizer, dtype)
        after = precision_shim.audit(model, optimizer, group=dist.group.WORLD)
        found[name] = {
            "before": before.to_dict(),
            "after": after.to_dict(),
            "shares": sum(p.to_local().numel() for p in trained),
        }
        if name == "fp16":
            scaler = LossScaler(device="cpu")
            found["fp16 with a scaler"] = precision_shim.audit(
                model, optimizer, scaler=scaler
            ).to_dict()
        if name == "fp32":
            wrong = {"exp_avg": "bf16", "params": torch.float32}
            found["expected"] = precision_shim.audit(model, optimizer, expected=wrong).to_dict()
            with torch.no_grad():  # a forward leaves FSDP2's root parameters gathered
                model(torch.ones(2, 8))
            found["gathered"] = precision_shim.audit(model, optimizer).to_dict()
        if name == "bf16":
            if launch.rank:  # change one state of one parameter, on one rank
                state = optimizer.state[trained[0]]
                state["exp_avg"] = state["exp_avg"].float()
            found["differs"] = precision_shim.audit(
                model, optimizer, group=dist.group.WORLD
            ).to_dict()
        del model, optimizer, trained
    found["one row"] = _one_row(launch)
    return found


def _one_row(launch: Launch) -> dict[str, Any]:
    """A bf16 model with an fp32 head of one row; the second rank has no part of the head."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8, bias=False).bfloat16(), torch.nn.Linear(8, 1, bias=False)
    )
    mesh = init_device_mesh("cpu", (launch.world,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    model[1](model[0](torch.ones(2, 8).bfloat16()).float()).sum().backward()
    optimizer.step()
    return precision_shim.audit(model, optimizer, group=dist.group.WORLD).to_dict()


def hybrid(launch: Launch) -> dict[str, Any]:
    """HSDP over two ranks: two copies of one shard, and one copy of two shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    launch.join()
    found = {}
    for copies, shards in ((launch.world, 1), (1, launch.world)):
        names = ("dp_replicate", "dp_shard")
        mesh = init_device_mesh("cpu", (copies, shards), mesh_dim_names=names)
        model = torch.nn.Linear(8, 8)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        found[f"{copies}x{shards}"] = precision_shim.audit(model, optimizer).to_dict()
        found[f"{copies}x{shards} table"] = str(precision_shim.audit(model, optimizer))
    return found


def flat(launch: Launch) -> dict[str, Any]:
    """FSDP1, which verl and SkyRL call ``fsdp``, in both forms of its parameters."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    launch.join()
    found = {}
    for name, original, strategy, width in (
        ("flat", False, ShardingStrategy.FULL_SHARD, 8),
        ("original", True, ShardingStrategy.FULL_SHARD, 8),
        ("not sharded", False, ShardingStrategy.NO_SHARD, 8),
        ("padded", False, ShardingStrategy.FULL_SHARD, 7),  # an odd number of parameters
        ("padded originals", True, ShardingStrategy.FULL_SHARD, 7),
    ):
        torch.manual_seed(7)
        model = FullyShardedDataParallel(
            torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, width)),
            device_id=torch.device("cpu"),
            use_orig_params=original,
            sharding_strategy=strategy,
        )
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        found[name] = precision_shim.audit(model, optimizer, group=dist.group.WORLD).to_dict()
        if name == "padded":
            for kind in (torch.optim.AdamW, functools.partial(torch.optim.SGD, momentum=0.9)):
                optimizer = kind(model.parameters(), lr=1e-3)
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
                found[type(optimizer).__name__] = str(precision_shim.audit(model, optimizer))
    return found


# -- lost updates ----------------------------------------------------------------------------------


def expert_updates(launch: Launch) -> dict[str, Any]:
    """The meters of a mixture of experts, whose chained optimizer has a part for the experts."""
    with on_megatron(launch, expert_model_parallel_size=2):
        honest = builds.HONEST["precision-aware"]
        build = replace(honest, config=honest.config | {"lr": 6e-6}, experts=True)
        chunks, optimizer = builds.make(build)
        watch = precision_shim.watch_updates(chunks, optimizer, every=1)
        for _ in range(3):
            builds.step_without_forward(chunks, optimizer)
        parts = precision_shim.audit(chunks, optimizer).parts
        return {
            "figures": watch.figures(),
            "parts": {one.name: one.updates for one in parts},
            "metrics": [watch.metrics(), meters.metrics(optimizer)],
        }


__all__ = [
    "differing",
    "expert_updates",
    "failing",
    "flat",
    "fsdp",
    "hybrid",
    "megatron",
    "prepare",
]
