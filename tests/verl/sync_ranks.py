"""The ranks of the weight sync's tests; ``tests/rank_server.py`` starts them.

A rank builds verl's real ``ActorRolloutRefWorker`` from verl's shipped config, and takes the stream
of weights that the worker would hand to the rollout engine.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import precision_shim

from ..rank_server import Launch, look_ahead
from . import fsdp_support as support

READS = ("_local_scalar_dense", "item", "equal")
"""Operators by which the host waits for a device."""


class Operators(TorchDispatchMode):
    """Counts operators: collectives, copies, and what the host reads."""

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
    """verl's real worker of an actor, after its ``init_model``."""
    import verl.trainer.config as shipped
    from hydra import compose, initialize_config_dir
    from verl.workers.engine_workers import ActorRolloutRefWorker

    actor = "actor_rollout_ref.actor"
    sharding = f"{actor}.fsdp_config"
    with initialize_config_dir(os.path.dirname(shipped.__file__), version_base=None):
        config = compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={os.environ['MODEL']}",
                "actor_rollout_ref.model.enable_gradient_checkpointing=False",
                "actor_rollout_ref.model.use_remove_padding=False",
                "++actor_rollout_ref.model.override_config.attn_implementation=eager",
                f"{actor}.strategy=fsdp2",
                f"{actor}.use_torch_compile=False",
                f"{actor}.use_dynamic_bsz=False",
                f"{actor}.ppo_mini_batch_size=4",
                f"{actor}.ppo_micro_batch_size_per_gpu=1",
                f"{actor}.optim.total_training_steps=40",
                f"++{sharding}.mixed_precision.param_dtype=fp16",
                f"{sharding}.use_torch_compile=False",
                "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
                *overrides,
            ],
        )
    torch.manual_seed(11)
    one = ActorRolloutRefWorker(config.actor_rollout_ref, "actor")
    one.init_model()
    return one


def trained(module: torch.nn.Module) -> None:
    """Move the weights, as an optimizer would, off what 16 bits hold; adapters away from 0."""
    torch.manual_seed(5 + dist.get_rank())
    with torch.no_grad():
        for one in module.parameters():
            own = support.local(one)
            own.add_(torch.randn_like(own, dtype=torch.float32).to(own.dtype) * 2**-6)


def whole(named: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Each tensor gathered, as a copy."""
    return {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).detach().clone()
        for name, one in named.items()
    }


def merged(engine: Any) -> dict[str, torch.Tensor]:
    """The weights with LoRA merged, by verl's and peft's own functions, while they are merged."""
    from verl.utils.fsdp_utils import merged_lora_context, normalize_peft_param_name

    with merged_lora_context(engine.module, backup_adapters=True):
        return whole(normalize_peft_param_name(engine.module.state_dict()))


def on_grid(tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16) -> float:
    """The share of the values that a dtype represents exactly."""
    flat = torch.cat([one.reshape(-1).double() for one in tensors.values()])
    return float((flat == flat.to(dtype).double()).double().mean())


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], dtype: Any) -> bool:
    """Whether two sets of weights have the same names, order and bits once rounded to a dtype."""
    return list(left) == list(right) and all(
        a.shape == b.shape and torch.equal(a.to(dtype), b.to(dtype))
        for a, b in zip(left.values(), right.values(), strict=True)
    )


def taken(engine: Any, **arguments: Any) -> dict[str, Any]:
    """What the rollout would get, and what sending it cost."""
    operators = Operators()
    with operators:
        stream, peft = engine.get_per_tensor_param(**arguments)
        before = sum(operators.seen.values())
        sent = {name: one.detach().clone() for name, one in stream}
    operators.seen["aten.clone"] -= len(sent)  # this function's own
    code = getattr(stream, "gi_code", None)
    return {
        "sent": sent,
        "peft": peft,
        "verls": code is None or f"{os.sep}verl{os.sep}workers" in code.co_filename,
        "eager": before,
        "operators": {name: count for name, count in operators.seen.items() if count},
    }


def stream(
    on: bool, dtype: str, stored: str = "fp32", lora: bool = False, key: str = "rollout.dtype"
) -> dict[str, Any]:
    """The stream of weights of a worker whose rollout has a dtype.

    Args:
        on: with the shim.
        dtype: the rollout's dtype, as the user writes it.
        stored: ``fsdp_config.model_dtype``.
        lora: train adapters, and merge them on the way.
        key: the key that has the rollout's dtype.
    """
    if on:
        precision_shim.install()
    adapters = ("lora_rank=4", "lora_alpha=8", "+lora.merge=True")
    one = worker(
        f"+actor_rollout_ref.{key}={dtype}".replace("+", "++"),
        f"++actor_rollout_ref.actor.fsdp_config.model_dtype={stored}",
        *(f"++actor_rollout_ref.model.{each.lstrip('+')}" for each in adapters if lora),
    )
    engine = one.actor.engine
    trained(engine.module)
    base = whole(engine.module.state_dict())
    reference = merged(engine) if lora else base
    with ours() as said:
        found = taken(engine)
    again = taken(engine)
    sent = found.pop("sent")
    after = whole(engine.module.state_dict())
    return {
        **{name: found[name] for name in ("verls", "eager", "operators")},
        "again": again["operators"] == found["operators"] and same(again["sent"], sent, None),
        "dtypes": sorted({str(tensor.dtype) for tensor in sent.values()}),
        "on bf16's grid": on_grid(sent),
        "reference on bf16's grid": on_grid(reference),
        "rounded once": {
            name: same(sent, {k: v.to(kind) for k, v in reference.items()}, torch.float64)
            for name, kind in (("fp16", torch.float16), ("bf16", torch.bfloat16))
        },
        "unrounded": same(sent, reference, torch.float64),
        "names": list(sent) == list(reference),
        "untouched": same(after, base, torch.float64),
        "bits": support.bits([sent[name].reshape(-1) for name in sorted(sent)]),
        "said": said,
        "decisions": [str(each) for each in precision_shim.status().decisions],
    }


@contextlib.contextmanager
def ours() -> Iterator[list[str]]:
    """The shim's own warnings."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [str(one.message) for one in caught if "recision" in one.category.__name__]


# -- processes ---------------------------------------------------------------------------------


def prepare() -> None:
    """Import verl, in the server, as on a machine whose accelerator is its CPU."""
    support.prepare()
    from verl.utils import flops_counter
    from verl.workers import engine_workers
    from verl.workers.engine import base

    flops_counter.get_device_flops = lambda *args, **kwargs: 1.0  # asks for the GPU's name
    for backends in base.EngineRegistry._engines.values():  # listed by accelerator
        for devices in backends.values():
            if "cuda" in devices:
                devices.setdefault("cpu", devices["cuda"])
    if hasattr(engine_workers, "set_numa_affinity"):  # asks for the driver of a GPU
        engine_workers.set_numa_affinity = lambda: None
    engine_workers.aggressive_empty_cache = lambda **kwargs: None
    look_ahead("verl")


def run(launch: Launch) -> dict[str, Any]:
    """A rank, from its start to its end."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{launch.store}", rank=launch.rank, world_size=launch.world
    )
    cases = {"stream": stream}
    found = cases[launch.case](**launch.options)
    dist.barrier()
    dist.destroy_process_group()
    return found
