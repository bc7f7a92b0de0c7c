"""Cases of the ranks in ``fsdp_ranks.py``: the weights that are sent to the rollout.

A rank builds verl's real ``ActorRolloutRefWorker`` from verl's shipped config, and reads the stream
of weights that the worker would send to the rollout engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import importlib.metadata
import os
import sys
from collections import Counter
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import precision_shim
from precision_shim.auditing import sent_weights
from precision_shim.precision.dtypes import name_of
from precision_shim_adapters.verl.rollout.weight_sync import rounds_weights

from ..every_framework.shim_warnings import ours
from ..processes.rank_server import look_ahead
from ..stand_ins.empty_packages import Empty
from . import fsdp_support as support
from .fsdp_ranks import Job, case
from .ray_workers import answer_for_gpus

READS = ("_local_scalar_dense", "item", "equal")
"""Operators at which the host waits for a device."""


class Operators(TorchDispatchMode):
    """Counts collectives, copies, and operators that read values on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, name = func.namespace, func.overloadpacket.__name__
        collective = "c10d" in space and name != "wait_tensor"
        if collective or name in ("_to_copy", "clone", "copy_", *READS):
            self.seen[f"{space}.{name}"] += 1
        return func(*args, **(kwargs or {}))


def worker(*overrides: str) -> Any:
    """verl's real actor worker, after its ``init_model``."""
    from verl.workers.engine_workers import ActorRolloutRefWorker

    actor = "actor_rollout_ref.actor"
    config = support.composed(
        os.environ["MODEL"],
        f"{actor}.use_dynamic_bsz=False",
        f"++{actor}.fsdp_config.strategy=fsdp2",
        f"{actor}.fsdp_config.use_torch_compile=False",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
        *overrides,
    )
    torch.manual_seed(11)
    one = ActorRolloutRefWorker(config.actor_rollout_ref, "actor")
    one.init_model()
    return one


def trained(module: torch.nn.Module) -> None:
    """Change weights to values that no 16-bit dtype represents; make adapters nonzero."""
    torch.manual_seed(5 + dist.get_rank())
    with torch.no_grad():
        for one in module.parameters():
            own = support.local(one)
            own.add_(torch.randn_like(own, dtype=torch.float32).to(own.dtype) * 2**-6)


def whole(named: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Copies of tensors, each gathered."""
    return {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).detach().clone()
        for name, one in named.items()
    }


def known(engine: Any, *, lora: bool) -> dict[str, dict[str, torch.Tensor]]:
    """The trainer's weights by kind, gathered without the code that makes the stream.

    With adapters, ``merged`` is gathered after verl's and peft's own functions merged them, and
    ``base`` has the weights without adapters.
    """
    from verl.utils.fsdp_utils import merged_lora_context, normalize_peft_param_name

    if not lora:
        return {"trainer": whole(engine.module.state_dict())}
    base = whole(normalize_peft_param_name(engine.module.state_dict()))
    with merged_lora_context(engine.module, backup_adapters=True):
        inside = whole(normalize_peft_param_name(engine.module.state_dict()))
    return {"merged": inside, "base": base}


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def labels(sent: dict[str, torch.Tensor], kinds: dict[str, dict[str, torch.Tensor]]) -> list[str]:
    """Each ``"KIND in DTYPE"`` that equals the stream in names, order, dtypes and bits.

    Each kind is rounded once to each dtype.
    """
    return [
        f"{kind} in {name}"
        for kind, tensors in kinds.items()
        for name, dtype in DTYPES.items()
        if same(sent, {key: one.to(dtype) for key, one in tensors.items()})
    ]


def on_grid(tensors: dict[str, torch.Tensor]) -> float:
    """The share of values that bf16 represents exactly."""
    flat = torch.cat([one.reshape(-1).double() for one in tensors.values()])
    return float((flat == flat.bfloat16().double()).double().mean())


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of weights have equal names, order, dtypes, and bits."""
    return list(left) == list(right) and all(
        a.dtype == b.dtype and torch.equal(a, b)
        for a, b in zip(left.values(), right.values(), strict=True)
    )


def taken(engine: Any, **arguments: Any) -> dict[str, Any]:
    """The weights that the rollout would receive, and counts of the operators that send them."""
    operators = Operators()
    with operators:
        stream, peft = engine.get_per_tensor_param(**arguments)
        before = sum(operators.seen.values())
        sent = {name: one.detach().clone() for name, one in stream}
    operators.seen["aten.clone"] -= len(sent)  # clones that only this test makes
    code = getattr(stream, "gi_code", None)
    return {
        "sent": sent,
        "peft": peft is None,
        "verls": code is None or f"{os.sep}verl{os.sep}workers" in code.co_filename,
        "eager": before,
        "operators": {name: count for name, count in operators.seen.items() if count},
    }


def stream(
    on: bool, dtype: str, stored: str = "fp32", lora: bool = False, key: str = "rollout.dtype"
) -> dict[str, Any]:
    """Read the stream of weights of a worker whose rollout has a dtype.

    Args:
        on: whether the shim is installed.
        dtype: the rollout's dtype, as the user writes it.
        stored: ``fsdp_config.model_dtype``.
        lora: whether adapters are trained, and merged before they are sent.
        key: the key that has the rollout's dtype.
    """
    if on:
        precision_shim.install()
    adapters = ("lora_rank=4", "lora_alpha=8", "lora.merge=True") if lora else ()
    with ours() as said:
        one = worker(
            f"++actor_rollout_ref.{key}={dtype}",
            f"++actor_rollout_ref.actor.fsdp_config.model_dtype={stored}",
            *(f"++actor_rollout_ref.model.{each}" for each in adapters),
        )
        engine = one.actor.engine
        trained(engine.module)
        before = whole(engine.module.state_dict())
        kinds = known(engine, lora=lora)
        found, again = taken(engine), taken(engine)
    sent = found.pop("sent")
    return {
        **{name: found[name] for name in ("verls", "eager", "operators")},
        "is": labels(sent, kinds),
        "again": same(again.pop("sent"), sent) and again == found,
        "dtypes": sorted({str(tensor.dtype) for tensor in sent.values()}),
        "on bf16's grid": on_grid(sent),
        "untouched": same(whole(engine.module.state_dict()), before),
        "said": rollouts(said),
        "compared": [each for each in said if COMPARED in each],
        "decisions": [str(each) for each in precision_shim.status().decisions],
    }


# -- engines and transports whose packages no environment has ----------------------------------


ROUTER = "model.layers.0.mlp.gate.weight"


class Adapter:
    """Maps torchtitan's weight names to Hugging Face's, as torchtitan's own adapters do."""

    from_hf_map: ClassVar = {"model.layers.{}.mlp.experts.{}.up.weight": "layers.{}.experts.up"}

    def to_hf(self, params: dict[str, Any]) -> dict[str, Any]:
        names = {
            "tok.weight": "model.embed_tokens.weight",
            "layers.0.norm": "model.norm.weight",
            "layers.0.gate": ROUTER,
        }
        return {names[name]: one for name, one in params.items()}


class Titan(torch.nn.Module):
    """A model with a state dict like torchtitan's; from verl 0.9.1 on it has stacked experts."""

    def __init__(self, *, stacked: bool) -> None:
        super().__init__()
        self.tok = torch.nn.Embedding(12, 8)
        layer = torch.nn.Module()
        layer.norm = torch.nn.Parameter(torch.rand(8))
        layer.gate = torch.nn.Parameter(torch.rand(4, 8))
        if stacked:
            layer.experts = torch.nn.Module()
            layer.experts.up = torch.nn.Parameter(torch.rand(4, 6, 8))
        self.layers = torch.nn.ModuleList([layer])


def titan(on: bool, dtype: str, ep: bool = False) -> dict[str, Any]:
    """Read the stream of verl's torchtitan engine.

    Args:
        on: whether the shim is installed.
        dtype: the rollout's dtype.
        ep: whether expert parallelism is on.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with engine_of_empty_packages("torchtitan"):
        impl = importlib.import_module("verl.workers.engine.torchtitan.transformer_impl")
        kind = impl.TorchTitanEngine
        stacked = hasattr(kind, "_expert_stack_slots")
        torch.manual_seed(3)
        module = Titan(stacked=stacked)
        fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        engine = object.__new__(kind)
        engine.module, engine._is_offload_param = [module], False
        engine.checkpointer = SimpleNamespace(sd_adapter=Adapter())
        mesh = SimpleNamespace(get_group=lambda: dist.group.WORLD)
        engine.parallel_dims = SimpleNamespace(
            ep_enabled=ep, ep=1, pp_enabled=False, get_optional_mesh=lambda name: mesh
        )
        engine.initialize = engine.get_data_parallel_rank = lambda *args: 0
        engine.is_mp_src_rank_with_outputs = lambda: True
        if on:
            precision_shim.install()
        with pytest.MonkeyPatch.context() as patch, ours() as said:
            base = importlib.import_module("verl.workers.engine.base")
            patch.setattr(base.EngineRegistry, "new", classmethod(lambda *a, **k: engine))
            worker(f"actor_rollout_ref.rollout.dtype={dtype}")
            found = taken(engine)
        named = module.state_dict()
        stack = named.pop("layers.0.experts.up", None)
        reference = whole(Adapter().to_hf(named))
        reference["lm_head.weight"] = reference["model.embed_tokens.weight"]
        if stack is not None:
            for index, one in enumerate(stack.full_tensor()):
                reference[f"model.layers.0.mlp.experts.{index}.up.weight"] = one.clone()
        sent = found.pop("sent")
        router, own = sent.pop(ROUTER), reference.pop(ROUTER)
        found["router"] = "exact" if torch.equal(router, own) else str(router.dtype)
        return {**found, "is": labels(sent, {"trainer": reference}), "said": rollouts(said)}


class Transfer:
    """mooncake's TransferEngine without a network."""

    def __init__(self) -> None:
        self.initialize = self.get_rpc_port = self.batch_register_memory = lambda *args: 0


class Store:
    """Reads each bucket that mooncake's engine fills, as a receiver would."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.received: dict[str, torch.Tensor] = {}

    def send_obj(self, info: dict[str, Any], rank: int) -> None:
        start = info["ptr"] - self.engine.buf.data_ptr()
        for name, meta in info["bucket_meta"].items():
            begin = start + meta["offset"]
            size = meta["dtype"].itemsize * meta["shape"].numel()
            raw = self.engine.buf[begin : begin + size].clone()
            self.received[name] = raw.view(meta["dtype"]).view(meta["shape"])


def mooncake(on: bool, dtype: str, written: str = "") -> dict[str, Any]:
    """Read the weights that verl's mooncake checkpoint engine sends.

    Args:
        on: whether the shim is installed.
        dtype: the rollout's dtype.
        written: ``rollout_dtype`` in the user's own engine_kwargs.
    """
    modules = {
        "mooncake": {},
        "mooncake.engine": {"TransferEngine": Transfer},
        "vllm": {},
        "vllm.distributed": {},
        "vllm.distributed.utils": {"StatelessProcessGroup": None},
    }
    if on:
        precision_shim.install()
    kwargs = "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.mooncake"
    with pytest.MonkeyPatch.context() as patch, ours() as said:
        for name, names in modules.items():
            module = ModuleType(name)
            vars(module).update(names)
            patch.setitem(sys.modules, name, module)
        importlib.import_module("verl.checkpoint_engine.mooncake_checkpoint_engine")
        one = worker(
            f"actor_rollout_ref.rollout.dtype={dtype}",
            "actor_rollout_ref.rollout.checkpoint_engine.backend=mooncake",
            "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1",
            f"++{kwargs}.device=cpu",
            *([f"++{kwargs}.rollout_dtype={written}"] if written else []),
        )
        engine, sender = one.actor.engine, one.checkpoint_engine
        trained(engine.module)
        store = Store(sender)
        sender.rank, sender.store, sender.wait_for_complete = 0, store, nothing
        kinds = known(engine, lora=False)
        asyncio.run(one.update_weights())
    return {"is": labels(store.received, kinds), "said": rollouts(said)}


async def nothing(*args: Any) -> None:
    """Replaces ``wait_for_complete``, because the test has no receiver."""


def kimi(on: bool, dtype: str) -> dict[str, Any]:
    """The weights that verl's kimi checkpoint engine would register, for a rollout's dtype."""
    with engine_of_empty_packages("checkpoint_engine"):
        impl = importlib.import_module("verl.checkpoint_engine.kimi_checkpoint_engine")
        engine = object.__new__(impl.KIMICheckpointEngine)
        engine.rollout_dtype = torch.bfloat16  # verl's default
        if on:
            precision_shim.install()
        with pytest.MonkeyPatch.context() as patch:
            base = importlib.import_module("verl.checkpoint_engine.base")
            made = classmethod(lambda *args, **kwargs: engine)
            patch.setattr(base.CheckpointEngineRegistry, "new", made)
            one = worker(
                f"actor_rollout_ref.rollout.dtype={dtype}",
                "actor_rollout_ref.rollout.checkpoint_engine.backend=kimi_ckpt_engine",
            )
        trained(one.actor.engine.module)
        stream, _ = one.actor.engine.get_per_tensor_param()
        buckets = impl.ckpt_get_named_tensor_buckets(stream, 2**30, 1, 0, engine.rollout_dtype)
        sent = {name: tensor for bucket in buckets for name, tensor in bucket.items()}
        return {"is": labels(sent, known(one.actor.engine, lora=False))}


def delta(
    on: bool, dtype: str, engine: str, strict: bool = False, strategy: str = "fsdp2"
) -> dict[str, Any]:
    """Start a worker with verl's delta checkpoint engine; returns the error and warnings."""
    if on:
        precision_shim.install(strict=strict)
    error: Exception | None = None
    with ours() as said:
        try:
            worker(
                f"actor_rollout_ref.rollout.dtype={dtype}",
                f"actor_rollout_ref.rollout.name={engine}",
                f"actor_rollout_ref.actor.strategy={strategy}",
                "actor_rollout_ref.rollout.checkpoint_engine.backend=delta_sharded",
            )
        except Exception as caught:
            error = caught
    return {"error": f"{type(error).__name__}: {error}", "said": rollouts(said)}


def shards(on: bool, dtype: str) -> dict[str, Any]:
    """Send a seed and a delta by verl's delta checkpoint engine; compare the receiver's weights.

    The checkpoint engine itself needs GPU packages; here it has only the seed's dtype.
    """
    if on:
        precision_shim.install()
    packages = engine_of_empty_packages("cupy")
    with packages, pytest.MonkeyPatch.context() as patch, ours() as said:
        base = importlib.import_module("verl.checkpoint_engine.base")
        impl = importlib.import_module("verl.checkpoint_engine.delta_checkpoint_engine")
        sender = object.__new__(impl.DeltaShardedCheckpointEngine)
        sender.rollout_dtype = torch.bfloat16  # verl's default
        made = classmethod(lambda *args, **kwargs: sender)
        patch.setattr(base.CheckpointEngineRegistry, "new", made)
        one = worker(
            f"actor_rollout_ref.rollout.dtype={dtype}",
            "actor_rollout_ref.rollout.name=sglang",
            "actor_rollout_ref.rollout.checkpoint_engine.backend=delta_sharded",
        )
        engine = one.actor.engine
        trained(engine.module)
        stream, _ = engine.get_per_tensor_param()
        held = {name: whole.to(sender.rollout_dtype) for name, whole in stream}
        seeded = labels(held, known(engine, lora=False))
        engine.prime_delta_snapshots()
        torch.manual_seed(7 + dist.get_rank())
        with torch.no_grad():  # change some elements by half a step of bf16
            for each in engine.module.parameters():
                own = support.local(each)
                own.mul_(1 + 2**-9 * (torch.rand_like(own) < 0.5))
        operators = Operators()
        with operators:
            entries = list(engine.get_per_tensor_param_delta_shard()[0])
    parts: list[Any] = [None] * dist.get_world_size()
    own = [(slots[0][0], index, value) for slots, _, _, index, value, _ in entries]
    dist.all_gather_object(parts, own)
    for name, index, value in (each for part in parts for each in part):
        held[name].view(-1)[index.long()] = value.to(held[name].dtype)
    return {
        "seed": seeded,
        "rounds": rounds_weights(sender),
        "is": labels(held, known(engine, lora=False)),
        "dtypes": sorted({dtype for _, dtype, *_ in entries}),
        "operators": dict(operators.seen),
        "said": rollouts(said),
    }


def audited(
    folder: str,
    dtype: str,
    features: str | None = None,
    wire: str = "",
    lora: bool = False,
    takes: int = 1,
) -> dict[str, Any]:
    """A rank's audit record of the weights that its worker sent.

    Args:
        folder: ``PRECISION_SHIM_AUDIT_DIR``.
        dtype: the rollout's dtype.
        features: the shim's features; ``None`` for all.
        wire: a dtype to which another engine rounds before it sends fp16; empty for none.
        lora: whether adapters are trained, and merged before they are sent.
        takes: how often the weights are sent.
    """
    adapters = ("lora_rank=4", "lora_alpha=8", "lora.merge=True") if lora else ()
    with ours() as said, pytest.MonkeyPatch.context() as patch:
        if wire:
            from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

            take = FSDPEngine.get_per_tensor_param

            def rounding(self: Any, **arguments: Any) -> Any:
                stream, *rest = take(self, **arguments)
                return (((n, t.to(DTYPES[wire]).half()) for n, t in stream), *rest)

            patch.setattr(FSDPEngine, "get_per_tensor_param", rounding)
        precision_shim.install(features=features, settings={"audit_dir": folder}, export=False)
        one = worker(
            f"++actor_rollout_ref.rollout.dtype={dtype}",
            *(f"++actor_rollout_ref.model.{each}" for each in adapters),
        )
        engine = one.actor.engine
        trained(engine.module)
        for _ in range(takes):
            sent = {name: each.clone() for name, each in engine.get_per_tensor_param()[0]}
        precision_shim.uninstall()
    found = [each for _, each in sent_weights.read(folder) if each.rank == dist.get_rank()]
    return {
        "halves": [dataclasses.asdict(each) for each in found],
        "elements": sum(each.numel() for each in sent.values()),
        "dtypes": sorted({name_of(each.dtype) for each in sent.values()}),
        "said": said,
    }


def audited_legacy(folder: str, dtype: str) -> dict[str, Any]:
    """The weights that 0.7.1's legacy worker passes to verl's ``ServerAdapter``, and their audit.

    vLLM and its dependencies are empty packages. Stand-ins replace verl's server and sender.

    Args:
        folder: ``PRECISION_SHIM_AUDIT_DIR``.
        dtype: the rollout's dtype.
    """
    sent: dict[str, torch.Tensor] = {}

    class Sender:
        def __init__(self, **given: Any) -> None: ...

        async def async_send_weights(self, weights: Any) -> None:
            sent.update((name, each.clone()) for name, each in weights)

    async def nothing(*given: Any, **named: Any) -> None: ...

    own, world = importlib.metadata.version, str(dist.get_world_size())
    with engine_of_empty_packages("vllm", "zmq", "msgspec"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            importlib.metadata, "version", lambda name: "0.12.0" if name == "vllm" else own(name)
        )
        patch.setenv("RAY_LOCAL_WORLD_SIZE", world)
        precision_shim.install(settings={"audit_dir": folder}, export=False)
        rollout = "actor_rollout_ref.rollout"
        one = support.Legacy(
            os.environ["MODEL"],
            "actor",
            f"{rollout}.dtype={dtype}",
            f"{rollout}.name=vllm",
            f"{rollout}.tensor_model_parallel_size=1",
            f"{rollout}.free_cache_engine=False",
            serves="actor_rollout",
        )
        from verl.workers.rollout.vllm_rollout import vllm_rollout

        patch.setattr(vllm_rollout, "BucketedWeightSender", Sender)
        adapter = one.worker.rollout
        adapter._execute_method = nothing
        adapter.server_handle = SimpleNamespace(clear_kv_cache=SimpleNamespace(remote=nothing))
        trained(one.module)
        asyncio.run(one.worker.rollout_mode())
        decisions = [str(each) for each in precision_shim.status().decisions]
        precision_shim.uninstall()
    found = [each for _, each in sent_weights.read(folder) if each.rank == dist.get_rank()]
    return {
        "adapter": type(adapter).__qualname__,
        "decisions": decisions,
        "halves": [dataclasses.asdict(each) for each in found],
        "elements": sum(each.numel() for each in sent.values()),
        "dtypes": sorted({name_of(each.dtype) for each in sent.values()}),
    }


class Nowhere:
    """A checkpoint engine that sends no weights."""

    def __init__(self, **_: Any) -> None: ...

    async def send_weights(self, weights: Any) -> None: ...


@contextlib.contextmanager
def engine_of_empty_packages(*packages: str) -> Iterator[None]:
    """Make missing packages importable, as empty packages."""
    finder = Empty(*packages)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "meta_path", [*sys.meta_path, finder])
        yield


COMPARED = ": the actor computes in "
"""A part of the warning that the dtypes of actor and rollout differ."""


def rollouts(said: list[str]) -> list[str]:
    """The warnings about the weights that are sent to the rollout."""
    return [each for each in said if "rollout" in each and COMPARED not in each]


def prepare() -> None:
    """Import verl in the server, and make the CPU its accelerator, for its workers too."""
    support.prepare()
    look_ahead("verl")
    let_workers_start()


@case
def sync(job: Job, kind: str, jobs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Run jobs of a kind, which is the name of a function of this module; returns their results."""
    let_workers_start()
    return {name: globals()[kind](**options) for name, options in jobs.items()}


def let_workers_start() -> None:
    """Replace what verl's workers ask of a GPU or its driver."""
    from verl.workers import engine_workers

    answer_for_gpus()
    engine_workers.aggressive_empty_cache = lambda **kwargs: None
