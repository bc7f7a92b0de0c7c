"""A NeMo-RL driver: NeMo-RL's own class starts the real SGLang and its router; prints results.

Run as a script, because workers inherit the driver's environment. NeMo-RL's cluster, router actor,
worker actor and HTTP client are real, in a real local Ray whose one GPU is only a number. SGLang's
arguments for a CPU are added to those that NeMo-RL's worker computes, which has no keys for them.
Arguments: a folder with a model, the rollout's dtype.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import warnings
from typing import Any

warnings.simplefilter("ignore")

import torch  # noqa: E402

from precision_shim.auditing import halves  # noqa: E402

MODULE = "tests.sglang.nemo_rl_driver"
WORKER = "nemo_rl.models.generation.sglang.sglang_worker.SGLangGenerationWorker"


def setup() -> None:
    """Ray's setup hook, which runs at the start of each worker."""
    from tests.sglang import cpu

    cpu.use_cpu()


def config_of(model: str, dtype: str) -> dict[str, Any]:
    """NeMo-RL's config of a generation by SGLang, for one engine on one GPU."""
    return {
        "backend": "sglang",
        "model_name": model,
        "max_new_tokens": 4,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": None,
        "stop_token_ids": None,
        "stop_strings": None,
        "_pad_token_id": 0,
        "sglang_cfg": {
            "model_path": model,
            "dtype": dtype,
            "random_seed": 0,
            "context_length": 64,
            "mem_fraction_static": 0.3,
            "skip_server_warmup": True,
            "tp_size": 1,
            "pp_size": 1,
            "dp_size": 1,
            "ep_size": 1,
            "sglang_server_config": {
                "num_gpus": 1,
                "num_gpus_per_engine": 1,
                "needs_offload": False,
                "cpu_weight_backup": False,
                "sglang_server_concurrency": 4,
                "pause_generation_mode": "retract",
            },
            "sglang_router_config": {},
        },
    }


def compute_for_a_cpu() -> None:
    """Add SGLang's arguments for a CPU to those that NeMo-RL's worker passes to SGLang."""
    from nemo_rl.models.generation.sglang.sglang_worker import SGLangGenerationWorker

    from tests.sglang.cpu import ARGUMENTS

    kind = SGLangGenerationWorker.__ray_metadata__.modified_class
    own = kind._compute_server_args

    def computed(self: Any, *args: Any) -> dict[str, Any]:
        found: dict[str, Any] = {**own(self, *args), **ARGUMENTS}
        return found

    kind._compute_server_args = computed


def held_now() -> dict[str, Any]:
    """The only record in the audit's directory."""
    ((_, one),) = halves.read(os.environ["PRECISION_SHIM_AUDIT_DIR"])
    return dataclasses.asdict(one)


def main(model: str, dtype: str) -> dict[str, Any]:
    """Start the servers as NeMo-RL does, generate, and end two weight syncs."""
    import ray

    import precision_shim
    from tests.ray_cluster import start

    start(3, num_gpus=1, runtime_env={"worker_process_setup_hook": f"{MODULE}.setup"})
    from nemo_rl.distributed import ray_actor_environment_registry as registry
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
    from nemo_rl.models.generation.sglang.sglang_generation import SGLangGeneration

    registry.ACTOR_ENVIRONMENT_REGISTRY[WORKER] = sys.executable  # keeps NeMo-RL from calling uv
    compute_for_a_cpu()
    cluster = RayVirtualCluster(
        bundle_ct_per_node_list=[1],
        use_gpus=True,
        num_gpus_per_node=1,
        max_colocated_worker_groups=1,
    )
    made = SGLangGeneration(cluster, config_of(model, dtype))
    (url,) = made.get_rollout_engine_urls()
    held = [held_now()]
    prompts = torch.tensor([[3, 4, 5]])
    given = BatchedDataDict({"input_ids": prompts, "input_lengths": torch.tensor([3])})
    output = made.generate(given)
    for _ in range(2):
        made.prepare_for_generation(tags=["weights"])
        made.prepare_for_generation(tags=["kv_cache"])
        held.append(held_now())
    seams = precision_shim.status().frameworks["nemo-rl"].seams
    found = {
        "url": url,
        "tokens": int(output["generation_lengths"][0]),
        "held": held,
        "seams": {one.target: one.state for one in seams if "SGLangGeneration" in one.target},
    }
    made.shutdown()
    cluster.shutdown()
    ray.shutdown()
    return found


if __name__ == "__main__":
    print("FOUND", json.dumps(main(*sys.argv[1:])), flush=True)
