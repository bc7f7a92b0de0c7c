"""A verl driver: real training workers in a real local Ray cluster; prints what came of them.

Run as a script, because a driver's environment is what its workers get. Arguments: ``fsdp`` or
``megatron``, a folder with a model, a folder for checkpoints.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

RANKS = 2
FIGURES = ("loss", "grad_norm", "lr", "loss_scale", "skipped_steps")


def main(backend: str, model: str, folder: Path) -> dict[str, Any]:
    """Train with an overflow, save, train on; then resume in new actors and train the same."""
    import ray
    import torch

    from tests.forks import WORKER_PYTHON
    from tests.ray_cluster import start
    from tests.verl import ray_workers
    from tests.verl.support import batch

    # One training has its workers started as Ray does that; the others are forked from a process
    # with most of the imports.
    own = backend == "fsdp" and "PRECISION_SHIM" in os.environ
    python = sys.executable if own else os.environ[WORKER_PYTHON]
    start(
        2 * RANKS,  # the first group keeps its place
        runtime_env={
            "worker_process_setup_hook": "tests.verl.ray_workers.setup",
            "py_executable": python,
            "env_vars": {ray_workers.BACKEND: backend},
        },
    )
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.workers.engine_workers import TrainingWorker

    def workers() -> Any:
        """verl's own worker group."""
        given = RayClassWithInitArgs(
            cls=ray.remote(TrainingWorker), config=ray_workers.worker_config(backend, model)
        )
        pool = RayResourcePool(process_on_nodes=[RANKS], use_gpu=False, max_colocate_count=1)
        made = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=given, device_name="cpu")
        made.reset()
        made.set_loss_fn(ray_workers.weighted_loss)
        return made

    def reports(group: Any) -> list[dict[str, Any]]:
        return ray.get([one.__ray_call__.remote(ray_workers.report) for one in group.workers])

    def train(group: Any, seed: int, weight: float = 1.0) -> dict[str, Any]:
        import verl.utils.tensordict_utils as tu

        data = batch(seed=seed, sequences=2 * RANKS)
        # On one rank, in one of its micro-batches.
        data["loss_weight"] = torch.tensor([1.0] * (2 * RANKS - 1) + [weight])
        tu.assign_non_tensor(data, global_token_num=[9] * 2 * RANKS, update_lr_scheduler=True)
        metrics = tu.get(group.train_batch(data).get(), "metrics")
        return {
            name: [float(one) for one in (value if isinstance(value, list) else [value])]
            for name, value in metrics.items()
            if name in FIGURES
        }

    def end(group: Any) -> None:
        for one in group.workers:
            ray.kill(one)

    first = workers()
    found: dict[str, Any] = {"start": reports(first), "driver": os.getpid()}
    found["steps"] = [train(first, 0)]
    found["taken"] = reports(first)
    found["steps"].append(train(first, 1, 2.0**40))
    found["skipped"] = reports(first)
    found["steps"].append(train(first, 2))
    first.save_checkpoint(str(folder / "saved"), global_step=3)
    found["saved"] = reports(first)
    found["on"] = [train(first, 3), train(first, 4)]
    found["end"] = reports(first)
    end(first)
    second = workers()
    second.load_checkpoint(str(folder / "saved"), del_local_after_load=False)
    found["resumed"] = reports(second)
    found["again"] = [train(second, 3), train(second, 4)]
    found["same end"] = reports(second)
    end(second)
    ray.shutdown()
    return found


if __name__ == "__main__":
    backend, model, folder = sys.argv[1:]
    try:
        print("FOUND " + json.dumps(main(backend, model, Path(folder))), flush=True)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
