"""Read an SGLang engine's dtypes and weights through its public calls, for the audit.

In the process of the engine's ``TokenizerManager`` the shim calls the manager; in other processes
the shim calls the engine's HTTP server. Manager and server both return the scheduler's arguments.
Only the manager has the config that SGLang resolved, with the dtype that SGLang chose for ``auto``.

For some models SGLang returns the values of a weight that a request names. SGLang converts a
weight's values to fp32, so the weight's own dtype stays unknown. For other models a request for a
weight makes SGLang log an error. SGLang converts the whole parameter to Python numbers before it
shortens the answer, so the shim reads only two small parameters.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib import request

import torch

from precision_shim.adapting import versioned
from precision_shim.auditing import sending
from precision_shim.auditing.halves import Held, Weights

from .held import TIMEOUT_S, Whose, dtype_name, is_due, reason_of
from .in_engine import count_exact

MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM", "GraniteForCausalLM")
"""Model classes for which SGLang returns weights under the names in ``NAMES``."""

NAMES = tuple(f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "kv")
ROWS = 16
SAMPLE = "k_proj and v_proj of the first layer"

_HEAD = "enable_fp32_lm_head"

_asking: set[Any] = set()
"""References to running tasks: without a reference Python may garbage-collect a running task."""


async def audit_manager(manager: Any, whose: Whose, sync: int = 0) -> None:
    """Write a ``TokenizerManager``'s audit record if one is due after weight sync ``sync``."""
    if is_due(sync):
        sending.write(await ask_manager(manager, whose, sync))


def audit_server(url: str, whose: Whose, sync: int = 0) -> None:
    """Write the audit record of a server's engine if one is due after weight sync ``sync``."""
    if is_due(sync):
        sending.write(ask_server(url, whose, sync))


async def ask_manager(manager: Any, whose: Whose, sync: int = 0) -> Held:
    """Read a ``TokenizerManager``.

    Args:
        manager: the engine's manager, which runs in this process.
        whose: identifies the engine in the record.
        sync: number of weight syncs so far.
    """
    known = _nothing(whose, sync, versioned("sglang"))
    try:
        (state, *_) = await _answer(manager.get_internal_state())
        config = manager.model_config
        known = _of_arguments(known, state)
        known = replace(
            known,
            computes=known.computes or dtype_name(config.dtype),
            quantization=str(config.quantization or ""),
        )
        known = replace(
            known, not_answered=_why_no_weights(known, state, config.hf_config.architectures)
        )
        if known.not_answered:
            return known

        from sglang.srt.managers.io_struct import GetWeightsByNameReqInput

        wanted = [GetWeightsByNameReqInput(name=name, truncate_size=ROWS) for name in NAMES]
        return _with(
            known, [await _answer(manager.get_weights_by_name(request)) for request in wanted]
        )
    except Exception as error:  # an audit must not end a rollout
        return replace(known, not_answered=reason_of(error))


def ask_server(url: str, whose: Whose, sync: int = 0) -> Held:
    """Read an engine through its HTTP server.

    Args:
        url: the server's URL, without a path.
        whose: identifies the engine in the record.
        sync: number of weight syncs so far.
    """
    known = _nothing(whose, sync, "sglang")
    try:
        info = _get(f"{url}/server_info")
        state = info["internal_states"][0]
        known = _of_arguments(replace(known, engine=f"sglang {info['version']}"), state)
        models = _get(f"{url}/model_info").get("architectures")
        known = replace(known, not_answered=_why_no_weights(known, state, models))
        if known.not_answered:
            return known
        asked = f"{url}/get_weights_by_name"
        return _with(known, [_get(asked, name=name, truncate_size=ROWS) for name in NAMES])
    except Exception as error:  # an audit must not end a rollout
        return replace(known, not_answered=reason_of(error))


def unasked(whose: Whose, sync: int, error: Exception) -> Held:
    """Make the record of an engine that could not be read."""
    return replace(_nothing(whose, sync, "sglang"), not_answered=reason_of(error))


def _nothing(whose: Whose, sync: int, engine: str) -> Held:
    """Make a record of an engine that has not answered yet."""
    return Held(
        framework=whose.framework,
        subject=whose.subject,
        name=whose.name,
        job=sending.job(),
        engine=engine,
        model="",
        computes="",
        sync=sync,
    )


def _of_arguments(known: Held, state: Mapping[str, Any]) -> Held:
    """Add the scheduler's arguments to a record; the dtype ``auto`` counts as unknown."""
    dtype = str(state["dtype"])
    return replace(
        known,
        model=str(state["model_path"]),
        computes="" if dtype == "auto" else dtype_name(dtype),
        quantization=str(state["quantization"] or ""),
        kv_cache=str(state["kv_cache_dtype"]),
        # With a LoRA adapter on the LM head, SGLang computes the logits without the fp32 option.
        head="fp32" if state.get(_HEAD) and not state.get("enable_lora") else "",
    )


def _why_no_weights(known: Held, state: Mapping[str, Any], models: Sequence[str] | None) -> str:
    model = ", ".join(models or ()) or "a model without a name"
    if known.quantization:
        return "SGLang tells the values of quantised weights without their scales"
    if state.get("enable_lora"):
        return "SGLang tells no weights by name where it has LoRA adapters"
    if int(state.get("pp_size", 1)) > 1:
        return "SGLang tells no weights by name of a model over several pipeline stages"
    return "" if model in MODELS else f"SGLang tells no weights of {model}"


def _with(known: Held, answers: Sequence[Any]) -> Held:
    """Add to a record the share of weight values, from all answers, that are exact in bf16."""
    if None in answers or [] in answers:
        return replace(known, not_answered=f"SGLang has not found {', '.join(NAMES)}")
    counts = [count_exact(torch.tensor(answer)) for answer in answers]
    exact, sampled = torch.stack(counts).sum(0).tolist()
    share = exact / sampled if sampled else None
    return replace(known, weights=Weights({}, share, sampled), sample=SAMPLE)


async def _answer(asked: Awaitable[Any]) -> Any:
    """Return an engine's answer, or raise on a timeout; a task still receives the late answer."""
    task = asyncio.ensure_future(asked)
    _asking.add(task)
    task.add_done_callback(_asking.discard)
    await asyncio.wait({task}, timeout=TIMEOUT_S)
    if not task.done():
        raise TimeoutError(f"no answer in {TIMEOUT_S:g} s")
    return task.result()


def _get(url: str, **values: Any) -> Any:
    """Send a request without a proxy, because the engines' servers are inside the cluster."""
    data = json.dumps(values).encode() if values else None
    asked = request.Request(url, data, {"Content-Type": "application/json"})
    with request.build_opener(request.ProxyHandler({})).open(asked, timeout=TIMEOUT_S) as answer:
        return json.load(answer)
