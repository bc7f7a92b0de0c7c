"""A verl driver: real training workers in a real local Ray cluster; prints the results.

Run as a script, because workers inherit the driver's environment. Arguments: the backends (see
``ray_workers.BACKEND``), a folder with a model, a folder for checkpoints, and further jobs in the
same cluster: names of functions of ``OTHERS``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
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


def group_of(count: int, given: dict[str, Any], **variables: str) -> Any:
    """verl's own worker group; each actor has a worker of each class."""
    from examples.processes import ports
    from verl.single_controller.ray import RayResourcePool, RayWorkerGroup
    from verl.single_controller.ray.base import create_colocated_worker_cls

    return RayWorkerGroup(
        resource_pool=RayResourcePool(
            process_on_nodes=[count], use_gpu=False, max_colocate_count=1
        ),
        ray_cls_with_init=create_colocated_worker_cls(given),
        device_name="cpu",
        master_port_range=ports.a_range(),
        worker_env=variables,
    )


def told(heard: list[str]) -> list[list[str]]:
    """What this driver was told of the workers so far, and of one without the package."""
    import ray
    from verl.single_controller.base import Worker
    from verl.single_controller.ray import RayClassWithInitArgs

    from tests.every_framework import lacking
    from tests.verl.ray_workers import BACKEND

    given = {"actor": RayClassWithInitArgs(cls=ray.remote(Worker))}
    return lacking.without_the_package(
        heard, lambda environment: group_of(1, given, **environment["env_vars"], **{BACKEND: ""})
    )


def sides(heard: list[str]) -> dict[str, Any]:
    """Run verl's ``run_ppo``, up to the actor that receives the config.

    Returns:
        The driver's warnings, and the dtype that the actor reads.
    """
    import precision_shim
    from tests.every_framework.both_sides import FOLLOW
    from tests.every_framework.shim_warnings import ours
    from tests.verl.ray_workers import Runner
    from tests.verl.test_both_sides import ROLLOUT, composed, side

    precision_shim.install(frameworks=["verl"], settings=FOLLOW, export=False)
    from verl.trainer.main_ppo import run_ppo
    from verl.utils.device import auto_set_device  # after install(), to get the wrapper

    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as answer:
        words = [*side("actor", "fp16"), f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.dtype=bf16"]
        words.append(f"trainer.default_local_dir={answer.name}")
        with composed(words) as config, ours() as said:
            auto_set_device(config)
            run_ppo(config, task_runner_class=Runner)
        return {**json.load(answer), "told": said}


OTHERS = {"told": told, "sides": sides}


def main(backends: str, model: str, folder: Path, *others: str) -> dict[str, Any]:
    """Train with overflows, save, train on; then resume in new actors and repeat the last steps.

    Returns:
        The results by backend, and those of the other jobs.
    """
    import ray
    import torch

    from tests.every_framework import lacking
    from tests.processes.forks import WORKER_PYTHON
    from tests.processes.ray_cluster import start
    from tests.verl import ray_workers
    from tests.verl.support import batch

    heard = lacking.listen()
    start(
        2 * RANKS + len(others),  # the first groups' CPUs stay reserved
        runtime_env={
            "worker_process_setup_hook": "tests.verl.ray_workers.setup",
            "py_executable": os.environ[WORKER_PYTHON],
            "env_vars": {ray_workers.BACKEND: backends},
        },
    )
    from verl.single_controller.ray import RayClassWithInitArgs
    from verl.workers.engine_workers import TrainingWorker

    names = backends.split(",")
    configs = {name: ray_workers.worker_config(name, model, RANKS) for name in names}

    def workers() -> dict[str, Any]:
        """verl's worker groups, one for each backend, in the same actors."""
        given = {
            name: RayClassWithInitArgs(cls=ray.remote(TrainingWorker), config=config)
            for name, config in configs.items()
        }
        groups: dict[str, Any] = group_of(RANKS, given).spawn(prefix_set=names)
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
    found |= {name: OTHERS[name](heard) for name in others}
    ray.shutdown()
    return found


if __name__ == "__main__":
    from tests.processes.ray_cluster import tell

    backends, model, folder, *others = sys.argv[1:]
    tell(lambda: main(backends, model, Path(folder), *others))
