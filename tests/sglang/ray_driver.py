"""A verl driver: verl's own replica starts the real SGLang in a real Ray actor; prints results.

Run as a script, because workers inherit the driver's environment. The driver does not install the
shim. Arguments: a folder with a model, the rollout's dtype. The actor of the trainer's worker has
only the attributes that verl reads: its node and its devices.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any


def setup() -> None:
    """Ray's setup hook, which runs at the start of each worker."""
    from tests.sglang import cpu

    cpu.use_cpu()


def main(model: str, dtype: str) -> dict[str, Any]:
    """Launch a server as verl does, generate, and end two weight syncs as verl's worker does."""
    import ray

    from tests.ray_cluster import start
    from tests.sglang import cpu
    from tests.sglang.servers import configs_of

    cpu.use_cpu()
    start(2, runtime_env={"worker_process_setup_hook": "tests.sglang.ray_driver.setup"})
    from verl.workers.rollout.replica import RolloutMode
    from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangReplica

    @ray.remote(num_cpus=0)
    class Trainer:
        """The trainer's worker; verl starts the server on this worker's node."""

    rollout, model_config = configs_of(model, dtype)
    replica = SGLangReplica(0, rollout, model_config, gpus_per_node=1)
    replica.rollout_mode = RolloutMode.HYBRID
    replica.workers = [
        Trainer.options(runtime_env={"env_vars": {"CUDA_VISIBLE_DEVICES": "0"}}).remote()
    ]

    async def drive() -> int:
        await replica.launch_servers()
        (server,) = replica.servers
        output = await server.generate.remote([3, 4, 5], {}, "one")
        for step in (1, 2):
            await server.set_global_steps.remote(step)
        return len(output.token_ids)

    def in_actor(server: Any) -> dict[str, Any]:
        import precision_shim

        seams = precision_shim.status().frameworks["verl"].seams
        return {
            "process": os.getpid(),
            "seams": {one.target: one.state for one in seams if "SGLangHttpServer" in one.target},
        }

    tokens = asyncio.run(drive())
    (server,) = replica.servers
    return {
        "tokens": tokens,
        "process": os.getpid(),
        "actor": ray.get(server.__ray_call__.remote(in_actor)),
    }


if __name__ == "__main__":
    print("FOUND", json.dumps(main(*sys.argv[1:])), flush=True)
