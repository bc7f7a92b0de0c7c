"""A SkyRL driver: SkyRL's own actor groups start workers in a real local Ray; prints the results.

Run as a script, because workers inherit the driver's environment. Arguments: a folder with a model,
an empty folder. Ray counts GPUs that do not exist.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any


def prepare() -> None:
    """Put the CPU in the place of the GPU; Ray calls it in each worker, also in the last."""
    with contextlib.suppress(ModuleNotFoundError):
        from tests.skyrl.cpu import stay_on_cpu

        stay_on_cpu()


def layers(kind: type, name: str) -> list[Any]:
    """A method and what is beneath it: Ray puts a function of its own over each."""
    found = [getattr(kind, name)]
    while hasattr(found[-1], "__wrapped__"):
        found.append(found[-1].__wrapped__)
    return found


def report(self: Any) -> dict[str, Any]:
    """Report a worker's seams and its bucket; runs in the actor."""
    import precision_shim

    skyrl = precision_shim.status().to_dict()["frameworks"].get("skyrl", {"seams": []})
    # By the class that a seam names: a subclass may have a method of its own that calls it.
    owners = {(kind.__module__, kind.__name__): kind for kind in type(self).__mro__}
    states, patched = {}, {}
    for seam in skyrl["seams"]:
        module, _, path = seam["target"].partition(":")
        kind, _, name = path.rpartition(".")
        if (module, kind) in owners:
            states[name] = seam["state"]
            found = layers(owners[module, kind], name) if seam["state"] == "wrapped" else []
            patched[name] = any(type(one).__name__ == "_BoundSeam" for one in found)
    ddp = self.cfg.policy.megatron_config.ddp_config
    return {
        "states": states,
        "patched": patched,
        "bucket written": isinstance(ddp.grad_reduce_in_fp32, bool),
        "bucket": ddp.grad_reduce_in_fp32,
    }


def tools(self: Any) -> list[str]:
    """Which tools a worker has imported; runs in the actor."""
    from tests.processes.loaded_tools import loaded_tools

    return loaded_tools()


def look(group: Any) -> dict[str, Any]:
    """What a group's worker reports, and what the driver sees of it."""
    import ray

    handle = group._actor_handlers[0]
    found: dict[str, Any] = ray.get(handle.__ray_call__.remote(report))
    found["listed"] = [n for n in ("init_model", "forward_backward") if hasattr(handle, n)]
    try:  # a call by name, as SkyRL's driver makes it, before there is a model
        ray.get(handle.forward_backward.remote(None))
    except ray.exceptions.RayTaskError as error:
        found["called"] = str(error)
    return found


def main(model: str, folder: Path) -> dict[str, Any]:
    """Train a worker on FSDP, look at one on Megatron, and start one without the package."""
    import ray

    from tests.every_framework import lacking
    from tests.processes import ray_cluster
    from tests.processes.forks import WORKER_PYTHON
    from tests.skyrl.cpu import import_megatron

    import_megatron()
    import skyrl.train.utils.utils as utils
    from skyrl.backends.skyrl_train.workers.fsdp import fsdp_worker
    from skyrl.backends.skyrl_train.workers.megatron import megatron_worker
    from skyrl.backends.skyrl_train.workers.worker import PPORayActorGroup
    from skyrl.backends.skyrl_train.workers.worker_dispatch import WorkerDispatch
    from skyrl.train.config import SkyRLTrainConfig

    from tests.skyrl.support import batch, fsdp_config, metrics_of

    told = lacking.listen()
    utils.peer_access_supported = lambda **kwargs: True  # asks for GPUs
    on_megatron = SkyRLTrainConfig.from_cli_overrides(["trainer.strategy=megatron"])
    apart = [f"trainer.placement.{name}=false" for name in ("colocate_all", "colocate_policy_ref")]
    on_fsdp = fsdp_config("policy", model, "fp16", *apart)
    variables = {}
    for config in (on_megatron, on_fsdp):
        variables |= utils.prepare_runtime_environment(config)
    ray_cluster.start(
        2,
        num_gpus=2,
        runtime_env={
            "worker_process_setup_hook": prepare,
            "env_vars": variables,
            "py_executable": os.environ[WORKER_PYTHON],
        },
    )
    group = PPORayActorGroup(on_fsdp.trainer, 1, 1, fsdp_worker.PolicyWorker)
    found = look(group)
    carried = ray.get_runtime_context().runtime_env["env_vars"]
    found["carried"] = {k: v for k, v in carried.items() if k.startswith("PRECISION_SHIM")}
    dispatch = WorkerDispatch(on_fsdp, policy_actor_group=group)
    dispatch.init_model("policy", model, num_training_steps=10)

    def train(seed: int, advantage: float = 1.0) -> tuple[dict[str, float], str]:
        data = batch(seed, advantage=advantage)
        metrics = metrics_of(dispatch.forward_backward("policy", data))
        return metrics, str(dispatch.optim_step("policy"))

    saved = str(folder / "saved")
    found["steps"] = [train(0), train(1, 1e9), train(2)]
    dispatch.save_checkpoint("policy", saved)
    found["on"] = [train(3), train(4)]
    dispatch.load_checkpoint("policy", saved)
    found["again"] = [train(3), train(4)]
    found["tools"] = ray.get(group._actor_handlers[0].__ray_call__.remote(tools))

    of_group = PPORayActorGroup(on_megatron.trainer, 1, 1, megatron_worker.PolicyWorker)
    found["megatron"] = look(of_group)

    where = ("local_rank", "master_addr", "master_port")
    given = {"cfg": on_fsdp.trainer, "world_size": 1, "rank": 0, "sequence_parallel_size": 1}
    found["told"] = lacking.without_the_package(
        told,
        lambda environment: fsdp_worker.PolicyWorker.options(
            num_cpus=0, num_gpus=0, runtime_env=environment
        ).remote(**given, **dict.fromkeys(where)),
    )
    ray.shutdown()
    return found


if __name__ == "__main__":
    from tests.processes.ray_cluster import tell

    tell(lambda: main(sys.argv[1], Path(sys.argv[2])))
