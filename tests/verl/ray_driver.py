"""A verl driver: real training workers in a real local Ray cluster; prints the results.

Run as a script, because workers inherit the driver's environment. Arguments: the backends (see
``ray_workers.BACKEND``), a folder with a model, a folder for checkpoints.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

RANKS = 2
HUGE = 2.0**40
"""A loss weight at which gradients overflow."""

SAVED = 500
"""The step of the checkpoint: torchtitan saves only at multiples of 500."""

FIGURES = ("loss", "grad_norm", "lr", "loss_scale", "skipped_steps")


def main(backends: str, model: str, folder: Path) -> dict[str, Any]:
    """Train with overflows, save, train on; then resume in new actors and repeat the last steps.

    Returns:
        The results by backend.
    """
    import ray
    import torch
    from examples.processes import ports

    from tests.processes.forks import WORKER_PYTHON
    from tests.processes.ray_cluster import start
    from tests.verl import ray_workers
    from tests.verl.support import batch

    start(
        2 * RANKS,  # the first group's CPUs stay reserved
        runtime_env={
            "worker_process_setup_hook": "tests.verl.ray_workers.setup",
            "py_executable": os.environ[WORKER_PYTHON],
            "env_vars": {ray_workers.BACKEND: backends},
        },
    )
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.single_controller.ray.base import create_colocated_worker_cls
    from verl.workers.engine_workers import TrainingWorker

    names = backends.split(",")
    configs = {name: ray_workers.worker_config(name, model, RANKS) for name in names}

    def workers() -> dict[str, Any]:
        """verl's own worker groups; each actor has a worker for each backend."""
        given = {
            name: RayClassWithInitArgs(cls=ray.remote(TrainingWorker), config=config)
            for name, config in configs.items()
        }
        made = RayWorkerGroup(
            resource_pool=RayResourcePool(
                process_on_nodes=[RANKS], use_gpu=False, max_colocate_count=1
            ),
            ray_cls_with_init=create_colocated_worker_cls(given),
            device_name="cpu",
            master_port_range=ports.a_range(),
        )
        groups: dict[str, Any] = made.spawn(prefix_set=names)
        for group in groups.values():
            group.reset()
            group.set_loss_fn(ray_workers.weighted_loss)
        return groups

    def reports(name: str, group: Any) -> list[dict[str, Any]]:
        return ray.get([one.__ray_call__.remote(ray_workers.report, name) for one in group.workers])

    def train(name: str, group: Any, seed: int, weight: float = 1.0) -> dict[str, Any]:
        import verl.utils.tensordict_utils as tu

        data = batch(seed=seed, sequences=2 * RANKS)
        # Only one micro-batch, on one rank, gets the weight.
        data["loss_weight"] = torch.tensor([1.0] * (2 * RANKS - 1) + [weight])
        tu.assign_non_tensor(
            data,
            global_token_num=[9] * 2 * RANKS,
            update_lr_scheduler=True,
            use_remove_padding=configs[name].model_config.use_remove_padding,
        )
        metrics = tu.get(group.train_batch(data).get(), "metrics")
        return {
            name: [float(one) for one in (value if isinstance(value, list) else [value])]
            for name, value in metrics.items()
            if name in FIGURES
        }

    def rest(name: str, group: Any) -> list[dict[str, Any]]:
        return [train(name, group, 3), train(name, group, 4, HUGE), train(name, group, 5)]

    def end(groups: dict[str, Any]) -> None:
        for one in groups[names[0]].workers:
            ray.kill(one)

    found: dict[str, Any] = {name: {"driver": os.getpid()} for name in names}
    places = {name: str(folder / name / f"global_step_{SAVED}") for name in names}
    first = workers()
    for name, group in first.items():
        found[name]["start"] = reports(name, group)
        found[name]["steps"] = [train(name, group, 0)]
        found[name]["taken"] = reports(name, group)
        found[name]["steps"].append(train(name, group, 1, HUGE))
        found[name]["skipped"] = reports(name, group)
        found[name]["steps"].append(train(name, group, 2))
        group.save_checkpoint(places[name], global_step=SAVED)
        found[name]["saved"] = reports(name, group)
        found[name]["on"] = rest(name, group)
        found[name]["end"] = reports(name, group)
    end(first)
    second = workers()
    for name, group in second.items():
        group.load_checkpoint(places[name], del_local_after_load=False)
        found[name]["resumed"] = reports(name, group)
        found[name]["again"] = rest(name, group)
        found[name]["same end"] = reports(name, group)
    end(second)
    ray.shutdown()
    return found


if __name__ == "__main__":
    from tests.processes.ray_cluster import tell

    backends, model, folder = sys.argv[1:]
    tell(lambda: main(backends, model, Path(folder)))
