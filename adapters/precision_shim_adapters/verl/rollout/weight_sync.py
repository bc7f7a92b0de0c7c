"""Send verl's weights to the rollout engine in the engine's dtype, rounded once.

verl's torchtitan engine and FSDP engine (since 0.9 only for merged LoRA) round every weight to
bf16, whatever ``actor_rollout_ref.rollout.dtype`` is. ``get_per_tensor_param`` returns a generator
that has not started. The shim does not start it, because it would run collective operations, but
reads which tensors it would gather, and gathers the same in the same order, rounded to the
rollout's dtype.

verl does not cast the weights of its other engines and workers. For a delta sync, every training
engine rounds to bf16, and verl's receiver in vLLM accepts only bf16: the shim rounds to the
rollout's dtype from FSDP to SGLang, and otherwise refuses rollout dtypes but bf16, or warns.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from types import GeneratorType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from precision_shim.adapting import (
    Call,
    Decision,
    Findings,
    Problem,
    decide,
    look,
    report,
    seam,
    versioned,
    warn,
)
from precision_shim.adapting.rollouts import AUTO
from precision_shim.errors import UnsupportedPrecisionError

from ...agreement.names import engine_name
from ...agreement.report import FEATURE
from ..config import ROLLOUT, SHARDED, TITAN
from .dtypes import asked_dtype

FSDP, TITANS, CHECKPOINTS = "fsdp weights", "torchtitan weights", "checkpoint engines"
"""Groups of seams: one for each engine that rounds weights, one for verl's checkpoint engines."""

DELTA = "delta_sharded"
"""Name of the backend of verl's checkpoint engine that sends only changed weights."""

_SUBJECT = "weights to the rollout"
_BF16 = "bfloat16"
_VLLM_DELTA = "verl.workers.rollout.vllm_rollout.delta_weight_transfer"
_INIT: dict[str, Any] = {
    "target": "verl.workers.engine_workers:ActorRolloutRefWorker.init_model",
    "relies_on": ("actor", "role", "rollout", "config"),
}
_FIRST: dict[str, Any] = {"feature": FEATURE, "optional": True}

_asked: WeakKeyDictionary[Any, tuple[str, str]] = WeakKeyDictionary()
"""Maps an actor's engine to the rollout dtype's name and its config key."""

_ROUTER = re.compile(r"\.(gate|router)\.|(correction|router|expert)_bias$")
"""Names of a router's weights in Hugging Face's models."""

_deltas: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""Maps an actor's engine to the dtype name that its delta checkpoint engine received."""


@seam(
    at=[{**_INIT, "group": FSDP}, {**_INIT, "group": TITANS}],
    why="the worker knows both the engine and the rollout's dtype; the engine does not",
    delete_when="verl sends weights in the rollout's dtype",
    **_FIRST,
)
def announce(call: Call) -> Any:
    """Store the rollout's dtype for the engine whose weights the worker will send.

    Raises:
        DtypeError: no engine computes in the rollout's dtype.
    """
    worker = call.instance
    if "actor" not in worker.role:
        return call.proceed()
    asked = asked_dtype(worker.config.rollout, ROLLOUT)
    result = call.proceed()
    _asked[worker.actor.engine] = asked
    return result


@seam(
    at=[
        {
            "target": f"{SHARDED}.get_per_tensor_param",
            "group": FSDP,
            "why": "returns the weights, unstarted; before 0.9 and for merged LoRA they are "
            "rounded to bf16",
            "upstream": "https://github.com/volcengine/verl/pull/7161",
            "delete_when": "verl sends merged LoRA in the rollout's dtype, and 0.9 is the oldest "
            "in use",
            "relies_on": ("params", "DTensor", "full_tensor", "module", "_is_offload_param"),
        },
        {
            "target": f"{TITAN}.get_per_tensor_param",
            "group": TITANS,
            "why": "returns the weights, unstarted, rounded to bf16",
            "delete_when": "verl's torchtitan engine sends weights in the rollout's dtype",
            "relies_on": ("params", "DTensor", "full_tensor"),
        },
    ],
    **_FIRST,
)
def send_weights(call: Call) -> Any:
    """Return an engine's weights rounded to the rollout's dtype and not to bf16."""
    stream, *rest = result = call.proceed()
    engine = call.instance
    found = inspect.getgeneratorlocals(stream) if isinstance(stream, GeneratorType) else {}
    if getattr(engine, "_qat_enabled", False) and _to_mend(engine, found.get("params")):
        return _left(
            engine, result, "quantisation-aware training quantises what verl rounded to bf16"
        )
    if not _to_mend(engine, stream):
        return result
    kind = stream.gi_code.co_name
    if {".0", "device"} <= found.keys():  # ``.0`` is a generator expression's first iterable
        ours = _gathered(found[".0"], found["device"], _wire(engine))
    elif {"dense", "expert_stacks", "device"} <= found.keys():  # torchtitan, from 0.9.1
        ours = _with_experts(
            found["dense"].items(), found["expert_stacks"], found["device"], _wire(engine)
        )
    elif kind == "_merged_lora_per_tensor_param":
        ours = _merged(engine, _wire(engine))
    elif kind == "iter_per_tensor_params_ep":
        return _left(
            engine, result, "verl gathers and rounds experts in one step under expert parallelism"
        )
    else:
        return _left(engine, result)
    return (ours, *rest)


def _to_mend(engine: Any, stream: Any) -> bool:
    """Whether verl's unstarted generator rounds to bf16 although the config sets another dtype."""
    name, key = _asked.get(engine, (_BF16, ""))
    if name == _BF16 or not _rounds(stream):
        return False
    if name == AUTO:
        _tell_auto(key, "verl rounds every weight to bf16 on the way to the rollout")
    return name != AUTO


def _rounds(stream: Any) -> bool:
    return (
        isinstance(stream, GeneratorType)
        and _BF16 in stream.gi_code.co_names
        and inspect.getgeneratorstate(stream) == inspect.GEN_CREATED
    )


def _wire(engine: Any) -> torch.dtype:
    name, _ = _asked[engine]
    reason = "verl itself would round them to bf16 on the way"
    chosen = "as the trainer stores them" if name == "float32" else f"{name}, rounded once"
    decide("verl", _SUBJECT, FEATURE, chosen, reason)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _left(engine: Any, result: Any, reason: str = "") -> Any:
    reason = reason or f"{result[0].gi_code.co_name} is a generator that the shim does not know"
    name, key = _asked[engine]
    message = (
        f"{versioned('verl')}: the weights reach the rollout rounded to bf16, although {key}={name}"
        f": {reason}, so the shim leaves verl's weight sync as it is"
    )
    chosen = "left as verl sends them, rounded to bf16"
    decided = Decision("verl", _SUBJECT, FEATURE, chosen, reason)
    remedy = f"Write {key}=bfloat16 and train in bf16."
    problem = Problem("rollout-dtype", "rollout", key, message, remedy)
    report(Findings((decided,), (problem,)))
    return result


def _tell_auto(key: str, what: str) -> None:
    warn(
        f"{versioned('verl')}: {key}=auto: {what}, and which dtype the engine takes is known only "
        f"to the engine, so the shim leaves it. Write {key}=float16, bfloat16 or float32."
    )


Pairs = Iterable[tuple[str, Any]]
Weights = Iterator[tuple[str, torch.Tensor]]


def _is_sharded(tensor: Any) -> bool:
    from torch.distributed.tensor import DTensor  # slow to import: not for ``plan``

    return isinstance(tensor, DTensor)


def _gathered(pairs: Pairs, device: Any, dtype: torch.dtype) -> Weights:
    for name, param in pairs:
        yield name, _whole(param, device, dtype, name) if _is_sharded(param) else param


def _whole(param: Any, device: Any, dtype: torch.dtype, name: str = "") -> torch.Tensor:
    moved = param.to(device, non_blocking=True)
    whole = moved.full_tensor() if _is_sharded(moved) else moved
    # Engines keep some models' routers in fp32, and themselves round a router that they do not.
    return whole if _ROUTER.search(name) else _rounded(whole, dtype)


def _rounded(one: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # An fp32 engine reads 16-bit weights exactly; a cast to fp32 here would only double the bytes.
    if dtype is torch.float32 or not one.is_floating_point():
        return one
    return one.to(dtype, non_blocking=True)


def _with_experts(
    dense: Pairs, stacks: Iterable[tuple[Any, Any]], device: Any, dtype: torch.dtype
) -> Weights:
    yield from _gathered(dense, device, dtype)
    for stack, slots in stacks:
        whole = _whole(stack, device, dtype)
        for index, (name, _) in enumerate(slots):
            yield name, whole[index].clone()
        del whole  # before the next stack is gathered, since a stack is large


def _merged(engine: Any, dtype: torch.dtype) -> Weights:
    """Merge LoRA into the weights, and yield the merged weights, as verl's generator does."""
    verl: Any = importlib.import_module(str(SHARDED).partition(":")[0])
    module, device = engine.module, verl.get_device_id()
    inner = getattr(module, "_fsdp_wrapped_module", module)
    try:
        with verl.merged_lora_context(module, backup_adapters=True):
            named = verl.normalize_peft_param_name(module.state_dict())
            for name, param in verl.convert_weight_keys(named, inner).items():
                if not _is_sharded(param):
                    yield name, param.detach().clone()
                    continue
                whole = _whole(param, device, dtype, name)
                # verl later restores the unmerged weight in the same memory.
                shared = param.to_local().untyped_storage().data_ptr()
                own = whole.untyped_storage().data_ptr()
                yield name, whole.clone() if own == shared else whole
    finally:
        if engine._is_offload_param:
            verl.offload_fsdp_model_to_cpu(module)


@seam(
    **{**_INIT, "relies_on": ("checkpoint_engine", "backend", "role", "config")},
    group=CHECKPOINTS,
    why="the worker makes its checkpoint engine here, and knows the rollout's dtype",
    delete_when="verl gives its checkpoint engines the rollout's dtype",
    **_FIRST,
)
def checkpoint_engine(call: Call) -> Any:
    """Set the rollout's dtype on a checkpoint engine that rounds weights, unless the user set one.

    Raises:
        DtypeError: no engine computes in the rollout's dtype or in the user's ``rollout_dtype``.
        UnsupportedPrecisionError: the delta checkpoint engine cannot send the rollout's dtype to
            vLLM. For SGLang, which accepts bf16 weights, the shim raises only in strict mode.
    """
    worker = call.instance
    if "actor" not in worker.role:
        return call.proceed()
    rollout, refused = worker.config.rollout, report_delta(worker.config)
    result = call.proceed()
    sender, delta = worker.checkpoint_engine, _backend(rollout) == DELTA
    if delta or rounds_weights(sender):
        name = "" if refused else _set_dtype(sender, rollout)
        if delta and name:
            _deltas[worker.actor.engine] = name
    return result


@seam(
    f"{SHARDED}.get_per_tensor_param_shard",
    group=CHECKPOINTS,
    why="returns this rank's shards, unstarted, rounded to bf16; the delta engine compares these",
    delete_when="verl's delta checkpoint engine sends the rollout's dtype",
    relies_on=("params", "DTensor", "ShardSpec"),
    only_if=(f"{SHARDED}.get_per_tensor_param_shard",),
    **_FIRST,
)
def send_shards(call: Call) -> Any:
    """Return the FSDP engine's shards rounded to the rollout's dtype and not to bf16."""
    stream, *rest = result = call.proceed()
    name = _deltas.get(call.instance)
    if name is None or not _rounds(stream):
        return result
    found = inspect.getgeneratorlocals(stream)
    if not {"params", "device", "ShardSpec"} <= found.keys():
        return _left(call.instance, result)
    params, device, spec = found["params"], found["device"], found["ShardSpec"]
    return (_shards(params, device, spec, getattr(torch, name)), *rest)


def _shards(
    params: Mapping[str, Any], device: Any, spec: Any, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor, Any]]:
    for name, param in params.items():
        own: Any = _rounded(param.to(device, non_blocking=True), dtype)
        own = own.to_local() if _is_sharded(own) else own
        yield name, own.reshape(-1), spec.from_param(param)


def report_delta(config: Any) -> bool:
    """Report whether the delta checkpoint engine refuses a rollout's dtype, and return it.

    Raises:
        DtypeError: no engine computes in the rollout's dtype.
        UnsupportedPrecisionError: the engine refuses the dtype, and the rollout is vLLM, or strict
            mode is on.
    """
    findings = judge_delta(config)
    if findings.problems and config["rollout"].get("name") == "vllm":
        raise UnsupportedPrecisionError(str(findings.problems[0]))
    report(findings)
    return bool(findings.problems)


def judge_delta(config: Any) -> Findings:
    """Find out whether the delta checkpoint engine can send weights in the rollout's dtype.

    ``config`` is the section ``actor_rollout_ref``.

    Raises:
        DtypeError: no engine computes in the rollout's dtype.
    """
    rollout, strategy = config["rollout"], str(config["actor"].get("strategy") or "fsdp")
    name, key = asked_dtype(rollout, ROLLOUT)
    engine = rollout.get("name")
    if _backend(rollout) != DELTA or name in (_BF16, AUTO) or engine not in ("vllm", "sglang"):
        return Findings()
    vllm = engine == "vllm"
    # verl before 0.9.1 itself refuses the delta engine with vLLM
    known = look(f"{_VLLM_DELTA}:VerlDeltaIPCWeightTransferEngine").found
    if not known if vllm else strategy in ("fsdp", "fsdp2"):
        return Findings()
    what = (
        "verl's receiver in vLLM takes no other dtype than bfloat16"
        if vllm
        else f"with actor.strategy={strategy} verl sends every weight rounded to bf16"
    )
    backend = f"{ROLLOUT}.checkpoint_engine.backend"
    message = f"{versioned('verl')}: {backend}=delta_sharded with {key}={name}: {what}"
    remedy = (
        f"Write {key}=bfloat16 and train in bf16, or choose another backend, such as "
        f"{backend}=nccl."
    )
    return Findings(problems=(Problem("rollout-dtype", "rollout", backend, message, remedy),))


def _set_dtype(engine: Any, rollout: Any) -> str:
    """Set a checkpoint engine's dtype; return the dtype's name, empty if verl's dtype stays."""
    backend = _backend(rollout)
    kwargs = (rollout.get("checkpoint_engine") or {}).get("engine_kwargs") or {}
    written = (kwargs.get(backend) or {}).get("rollout_dtype")
    at = f"{ROLLOUT}.checkpoint_engine.engine_kwargs.{backend}.rollout_dtype"
    name, key = asked_dtype(rollout, ROLLOUT)
    if written is not None:
        own = engine_name(written, at, versioned("verl"), also=())
        engine.rollout_dtype = getattr(torch, own)  # ``Tensor.to`` raises for a string
        if name not in (own, AUTO):
            warn(
                f"{versioned('verl')}: {at}={own}, but {key}={name}: the weights are rounded to "
                f"{own} on the way to the rollout. Leave {at} out, or write {name} there."
            )
        return own
    if name == AUTO:
        _tell_auto(key, f"the checkpoint engine {backend} rounds every weight to bf16")
    if name in (AUTO, _BF16):
        return ""
    engine.rollout_dtype = getattr(torch, name)
    reason = f"{key}; the checkpoint engine {backend} would round to bf16"
    decide("verl", _SUBJECT, FEATURE, name, reason)
    return name


def rounds_weights(engine: Any) -> bool:
    """Whether a checkpoint engine rounds weights; some engines only store ``rollout_dtype``."""
    send = inspect.unwrap(engine.send_weights)
    casts = "rollout_dtype" in getattr(getattr(send, "__code__", None), "co_names", ())
    return casts or "Delta" in type(engine).__name__


def _backend(rollout: Any) -> str:
    return str((rollout.get("checkpoint_engine") or {}).get("backend") or "")
