"""A NeMo-RL driver with a generation worker in a real local Ray cluster; prints its results.

Run as a script, because workers inherit the driver's environment. NeMo-RL's own builder makes
the actor as the second worker of a two-GPU engine, because a second worker starts no engine.
``Engine`` stands in for vLLM, which is not installed; ``tests/vllm/test_nemo_rl.py`` runs vLLM.
"""

from __future__ import annotations

import json
import os
import warnings
from types import SimpleNamespace
from typing import Any

warnings.simplefilter("ignore")

import torch  # noqa: E402

CONFIG = {
    "model_name": "no model",
    "vllm_cfg": {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "expert_parallel_size": 1,
        "gpu_memory_utilization": 0.1,
        "precision": "float16",
        "async_engine": False,
    },
}
MODULES = "nemo_rl.models.generation.vllm"
KINDS = {
    "": f"{MODULES}.vllm_worker.VllmGenerationWorker",
    "_async": f"{MODULES}.vllm_worker_async.VllmAsyncGenerationWorker",
}
"""The dotted names of the worker classes, by the suffix of their methods."""

METHODS = ("post_init", "update_weights_via_ipc_zmq", "update_weights_from_collective")


class Engine:
    """Has one fp16 layer, and the attributes of vLLM's ``LLM`` that NeMo-RL and the shim use."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        model = SimpleNamespace(model="a model", dtype=torch.float16, quantization=None)
        cache = SimpleNamespace(cache_dtype="auto")
        self.vllm_config = SimpleNamespace(model_config=model, cache_config=cache)

    def collective_rpc(self, method: str, timeout: Any = None, args: Any = ()) -> Any:
        self.asked.append(method)
        if method != "apply_model":
            return [True]
        return [function(torch.nn.Linear(64, 64).half()) for function in args]


class AsyncEngine(Engine):
    """Has the attributes of vLLM's ``AsyncLLM`` that NeMo-RL and the shim use."""

    async def collective_rpc(self, method: str, timeout: Any = None, args: Any = ()) -> Any:
        return super().collective_rpc(method, timeout, args)


def give(self: Any, suffix: str) -> None:
    """Set the stand-in engine on a worker; runs in the actor."""
    from tests.nemo_rl.generation_driver import AsyncEngine, Engine

    self.llm = AsyncEngine() if suffix else Engine()
    self.cfg["vllm_cfg"]["async_engine"] = bool(suffix)
    self._mtp_load_from_disk = False  # from 0.7 on NeMo-RL sets this field with the engine


def asked(self: Any) -> list[str]:
    """Return the names of the methods called on a worker's engine; runs in the actor."""
    found: list[str] = self.llm.asked
    return found


def main() -> dict[str, Any]:
    """Make the asynchronous worker and run two weight syncs; returns the answers and the calls."""
    import ray

    from tests.forks import WORKER_PYTHON
    from tests.ray_cluster import start

    start(2)
    from nemo_rl.distributed.worker_groups import RayWorkerBuilder

    suffix = "_async"
    group = ray.util.placement_group([{"CPU": 1}])
    ray.get(group.ready())
    worker = RayWorkerBuilder(KINDS[suffix], CONFIG)(
        group,
        0,
        0,
        None,
        name="vllm_policy-0-0",
        runtime_env={"py_executable": os.environ[WORKER_PYTHON]},
    )
    ray.get(worker.__ray_call__.remote(give, suffix))
    done = [ray.get(getattr(worker, f"{one}{suffix}").remote()) for one in METHODS]
    found = {"done": done, "asked": ray.get(worker.__ray_call__.remote(asked))}
    ray.shutdown()
    return found


if __name__ == "__main__":
    print("FOUND " + json.dumps(main()), flush=True)
