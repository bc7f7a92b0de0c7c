"""The server in ``test_verl.py``: verl's real ``SGLangHttpServer`` with the real SGLang.

verl makes the server a Ray actor (see ``ray_driver.py``); here the server is an object in a fork. A
weight sync is SGLang's own call with verl's payload, and then the call that ends verl's sync.
"""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

import precision_shim
from precision_shim.auditing import halves
from precision_shim_adapters.rollout import held_sglang
from precision_shim_adapters.rollout.held import Whose
from precision_shim_adapters.rollout.held_sglang import NAMES, ROWS

from ..rank_server import Launch
from . import cpu

NOTHING: Mapping[str, Any] = MappingProxyType({})


def configs_of(model: str, dtype: str, engine_kwargs: Mapping[str, Any] = NOTHING) -> Any:
    """verl's configs of a rollout and of its model."""
    from verl.workers.config import HFModelConfig, RolloutConfig

    rollout = RolloutConfig(
        name="sglang",
        dtype=dtype,
        tensor_model_parallel_size=1,
        gpu_memory_utilization=0.3,
        prompt_length=16,
        response_length=16,
        load_format="auto",
        engine_kwargs={"sglang": {**cpu.ARGUMENTS, **engine_kwargs}},
    )
    return rollout, HFModelConfig(path=model)


def server_of(model: str, dtype: str, engine_kwargs: Mapping[str, Any] = NOTHING) -> Any:
    """verl's server for a model, before it is started."""
    from verl.workers.rollout.replica import RolloutMode
    from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

    rollout, model_config = configs_of(model, dtype, engine_kwargs)
    return SGLangHttpServer(
        config=rollout,
        model_config=model_config,
        rollout_mode=RolloutMode.STANDALONE,
        workers=[],
        replica_rank=0,
        node_rank=0,
        nnodes=1,
        cuda_visible_devices="",
        base_gpu_id=0,
    )


async def sync(server: Any, weights: dict[str, torch.Tensor], step: int) -> None:
    """Run a weight sync as verl's ``ServerAdapter`` does."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
    from sglang.srt.utils import MultiprocessingSerializer

    payload = MultiprocessingSerializer.serialize(list(weights.items()))
    done, message = await server.tokenizer_manager.update_weights_from_tensor(
        UpdateWeightsFromTensorReqInput(serialized_named_tensors=[payload]), None
    )
    assert done, message
    await server.set_global_steps(step)


async def synced(folder: str, model: str, dtype: str) -> Any:
    """Run a server with two syncs; returns the audit's record at the start and after each sync."""
    from transformers import AutoModelForCausalLM

    server = server_of(model, dtype)
    await server.launch_server()
    found = [held(folder)]
    weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    for step, wire in enumerate((torch.float16, torch.bfloat16)):
        await sync(server, {name: one.to(wire) for name, one in weights.items()}, step)
        found.append(held(folder))
    output = await server.generate([3, 4, 5], {}, "one")
    return {"held": found, "tokens": len(output.token_ids), "told": await told(server, NAMES[0])}


async def overridden(folder: str, model: str, dtype: str, engine_kwargs: dict[str, Any]) -> Any:
    """The audit's record of a server whose engine_kwargs override the rollout's config."""
    await server_of(model, dtype, engine_kwargs).launch_server()
    return held(folder)


async def unaudited(folder: str, model: str, dtype: str) -> Any:
    """Count the shim's requests to a server without an audit directory."""
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    asked: list[str] = []
    own = TokenizerManager.get_internal_state

    async def noted(manager: Any) -> Any:
        asked.append("state")
        return await own(manager)

    TokenizerManager.get_internal_state = noted
    server = server_of(model, dtype)
    await server.launch_server()
    await server.set_global_steps(1)
    before = list(asked)
    await server.tokenizer_manager.get_internal_state()
    return {"asked": before, "asked by itself": asked, "held": held(folder)}


async def silent(folder: str, model: str, dtype: str) -> Any:
    """The audit's records while the engine's scheduler is stopped, and after it resumes."""
    server = server_of(model, dtype)
    await server.launch_server()
    schedulers = multiprocessing.active_children()
    held_sglang.TIMEOUT_S = 0.5
    for one in schedulers:
        os.kill(one.pid, signal.SIGSTOP)
    await server.set_global_steps(1)
    stopped = held(folder)
    for one in schedulers:
        os.kill(one.pid, signal.SIGCONT)
    held_sglang.TIMEOUT_S = 60.0
    await server.set_global_steps(2)
    return {"stopped": stopped, "going on": held(folder)}


async def over_http(folder: str, model: str, dtype: str) -> Any:
    """The audit's record of SGLang's own HTTP server, and of a port without a server."""
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs

    with socket.socket() as free, socket.socket() as other:
        free.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        os.environ["SGLANG_GRPC_PORT"] = str(other.getsockname()[1])  # default: port + 10,000
    arguments = ServerArgs(
        model_path=model,
        dtype=dtype,
        port=port,
        mem_fraction_static=0.3,
        skip_server_warmup=True,
        **cpu.ARGUMENTS,
    )
    process = multiprocessing.Process(target=launch_server, args=(arguments,))
    process.start()
    whose = Whose("nemo-rl", halves.ROLLOUT, "server")
    while (one := held_sglang.ask_server(arguments.url(), whose, 1)).not_answered.startswith("URL"):
        assert process.is_alive()
        time.sleep(0.2)
    nobody = held_sglang.ask_server("http://127.0.0.1:9", whose)
    return {"held": dataclasses.asdict(one), "nobody": dataclasses.asdict(nobody)}


async def told(server: Any, name: str) -> Any:
    """SGLang's own answer to a request for a weight."""
    from sglang.srt.managers.io_struct import GetWeightsByNameReqInput

    asked = GetWeightsByNameReqInput(name=name, truncate_size=ROWS)
    return await server.tokenizer_manager.get_weights_by_name(asked)


def held(folder: str) -> dict[str, Any] | None:
    """The only audit record in a folder; None if there is none."""
    found = [dataclasses.asdict(one) for _, one in halves.read(folder)]
    return found[0] if found else None


CASES = {one.__name__: one for one in (synced, overridden, unaudited, silent, over_http)}


def prepare() -> None:
    """Import verl and SGLang in the server of ranks."""
    cpu.use_cpu()
    import verl.workers.rollout.sglang_rollout.async_sglang_server  # noqa: F401


def run(launch: Launch) -> Any:
    """Run a server from its start to its end."""
    from sglang.srt.utils import kill_process_tree

    folder = "" if launch.case == "unaudited" else launch.folder
    precision_shim.install(settings={"audit_dir": folder}, export=False)
    try:
        return asyncio.run(CASES[launch.case](launch.folder, **launch.options))
    finally:
        kill_process_tree(None, include_parent=False)
