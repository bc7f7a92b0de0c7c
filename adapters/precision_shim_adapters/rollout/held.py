"""Read a vLLM engine's dtypes and weights through its public calls, for the audit.

An engine is the ``LLM``, ``LLMEngine`` or ``AsyncLLM`` object of a framework's rollout.
``collective_rpc("apply_model", ...)`` runs ``in_engine`` on the model of each worker. An engine in
another process accepts a function only if ``VLLM_ALLOW_INSECURE_SERIALIZATION=1`` is set; otherwise
the audit's record contains a hint. ``held_sglang`` reads SGLang's engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from precision_shim.adapting import versioned
from precision_shim.auditing import sending
from precision_shim.auditing.halves import Held, Weights
from precision_shim.auditing.layers import kind_of
from precision_shim.precision.dtypes import name_of

from .in_engine import ignored_layers, read_model

TIMEOUT_S = 120.0
"""Timeout of a request in seconds; long, because a starting engine may still compile its model."""

_syncs: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""For each framework object with an engine: how many weight syncs the engine has received."""

_CALL = "apply_model"
_HINT = "set VLLM_ALLOW_INSECURE_SERIALIZATION=1 for the rollout to have it asked"


@dataclass(frozen=True)
class Whose:
    """Identifies the engine that the audit reads.

    Attributes:
        framework: the framework's name.
        subject: the role of the engine's model in the job, such as ``"rollout"``.
        name: the engine's name among the job's engines.
    """

    framework: str
    subject: str
    name: str


def ask(engine: Any, whose: Whose, sync: int = 0) -> Held:
    """Read an ``LLM`` or an ``LLMEngine``, whose calls are synchronous.

    Args:
        engine: the engine.
        whose: identifies the engine in the record.
        sync: number of weight syncs so far.
    """
    known = _of_config(engine, whose, sync)
    try:
        return _with(known, engine.collective_rpc(_CALL, TIMEOUT_S, (read_model,)))
    except Exception as error:  # an audit must not end a rollout
        return replace(known, not_answered=reason_of(error))


async def ask_async(engine: Any, whose: Whose, sync: int = 0) -> Held:
    """Read an ``AsyncLLM``, whose calls are asynchronous; for the arguments see ``ask``."""
    known = _of_config(engine, whose, sync)
    try:
        answer = engine.collective_rpc(_CALL, TIMEOUT_S, (read_model,))
        return _with(known, await asyncio.wait_for(answer, TIMEOUT_S))
    except Exception as error:  # an audit must not end a rollout
        return replace(known, not_answered=reason_of(error))


def audit(engine: Any, whose: Whose, sync: int = 0) -> None:
    """Write the audit record of an engine that ``ask`` reads, if due after weight sync ``sync``."""
    if is_due(sync):
        sending.write(ask(engine, whose, sync))


async def audit_async(engine: Any, whose: Whose, sync: int = 0) -> None:
    """Write an ``AsyncLLM``'s audit record if one is due after weight sync ``sync``."""
    if is_due(sync):
        sending.write(await ask_async(engine, whose, sync))


def is_due(sync: int) -> bool:
    """Whether the audit reads an engine after weight sync ``sync``; 0 means the engine's start."""
    return sending.is_wanted() and (not sync or sync in sending.AT)


def count_sync(owner: Any) -> int:
    """Count a weight sync of an engine and return the sync's number, starting at 1.

    Args:
        owner: the framework's object that contains the engine.
    """
    _syncs[owner] = number = _syncs.get(owner, 0) + 1
    return number


def _of_config(engine: Any, whose: Whose, sync: int) -> Held:
    """Make a record from the engine's config, which vLLM resolved before the engine started."""
    config = getattr(engine, "llm_engine", engine).vllm_config
    model, cache = config.model_config, config.cache_config
    ignored = ignored_layers(getattr(config, "quant_config", None))
    head = getattr(model, "head_dtype", None)
    return Held(
        framework=whose.framework,
        subject=whose.subject,
        name=whose.name,
        job=sending.job(),
        engine=versioned("vllm"),
        model=str(model.model),
        computes=dtype_name(model.dtype),
        quantization=str(model.quantization or ""),
        ignored=None if ignored is None else tuple(ignored),
        kv_cache=str(cache.cache_dtype),
        head="" if head is None else dtype_name(head),
        sync=sync,
    )


def _with(known: Held, answers: Iterable[Mapping[str, Any]]) -> Held:
    """Add the answers of all workers to a record; the workers may have different layers."""
    kinds: dict[str, dict[str, int]] = {}
    dtypes: dict[str, int] = {}
    quantised: dict[str, None] = {}
    plain: dict[str, None] = {}
    caches: set[str] = set()
    ignored = known.ignored
    exact = sampled = 0
    for answer in answers:
        for name, (dtype, elements, in_quantised) in answer["parameters"].items():
            of_kind, short = kinds.setdefault(kind_of(name), {}), dtype_name(dtype)
            of_kind[short] = of_kind.get(short, 0) + elements
            if not in_quantised:
                dtypes[short] = dtypes.get(short, 0) + elements
        quantised |= dict.fromkeys(answer["quantised"])
        plain |= dict.fromkeys(answer["plain"])
        caches |= {dtype_name(dtype) for dtype in answer["kv_cache"]}
        ignored = ignored if answer["ignored"] is None else tuple(answer["ignored"])
        exact, sampled = exact + answer["exact"], sampled + answer["sampled"]
    return replace(
        known,
        kinds=kinds,
        kv_held=tuple(sorted(caches)),
        quantised=tuple(quantised),
        plain=tuple(plain),
        ignored=ignored,
        weights=Weights(dtypes, exact / sampled if sampled else None, sampled),
    )


def dtype_name(dtype: Any) -> str:
    """The canonical name of a dtype or of torch's dtype name; other names stay unchanged."""
    found = getattr(torch, str(dtype).removeprefix("torch."), None)
    return name_of(found) if isinstance(found, torch.dtype) else str(dtype)


def reason_of(error: Exception) -> str:
    """Return the reason why an engine did not answer, in one line."""
    text = str(error).splitlines()[0][:200] if str(error) else ""
    if "VLLM_ALLOW_INSECURE_SERIALIZATION" in str(error):
        return f"the engine's process takes no function; {_HINT}"
    return f"{type(error).__name__}: {text}".rstrip(": ")
