"""A NeMo-RL driver: policies of real workers in a real local Ray cluster; prints the results.

Run as a script, because workers inherit the driver's environment. Arguments: a folder with a model,
a folder for checkpoints, and kinds of workers, of which the last saves and resumes.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")


def report(self):
    """Report a worker's seams, parameter digest and loss scale; runs in the actor."""
    import hashlib
    import os

    import precision_shim
    from tests.nemo_rl.support import scaler_of
    from tests.processes.loaded_tools import loaded_tools

    scaler = scaler_of(self)
    digest = hashlib.sha256()
    for name, one in sorted(self.model.state_dict().items()):
        local = one.to_local() if hasattr(one, "to_local") else one
        digest.update(name.encode() + local.detach().float().contiguous().numpy().tobytes())
    framework = precision_shim.status().frameworks.get("nemo-rl")
    return {
        "pid": os.getpid(),
        "mro": [f"{one.__module__}.{one.__qualname__}" for one in type(self).__mro__],
        "wrapped": sorted(
            seam.target
            for seam in (framework.seams if framework else ())
            if seam.state == "wrapped"
        ),
        "parameters": digest.hexdigest(),
        "scale": scaler.get_scale() if scaler else None,
        "skipped": scaler.counter.skipped if scaler else None,
        "tools": loaded_tools(),
    }


def main(model: Path, folder: Path, kinds: list[str]) -> dict[str, object]:
    """Train a worker of each kind with an overflow; save and resume one of the last kind."""
    import ray

    from tests.every_framework import lacking
    from tests.nemo_rl import support
    from tests.processes.forks import WORKER_PYTHON
    from tests.processes.ray_cluster import start

    told = lacking.listen()
    start(4)
    from nemo_rl.distributed import ray_actor_environment_registry as registry
    from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
    from nemo_rl.distributed.worker_groups import RayWorkerBuilder
    from nemo_rl.models.policy.lm_policy import Policy

    def name_of(kind):
        return support.NAMES[kind].replace(":", ".")

    def policy(kind, python, **paths):
        registry.ACTOR_ENVIRONMENT_REGISTRY[name_of(kind)] = python  # keeps NeMo-RL from calling uv
        config = support.policy_config(
            model,
            "float16",
            kind,
            # The first step overflows; backoff_factor then lowers the scale to one that fits fp16.
            precision_shim={"loss_scale_init": 1e30, "backoff_factor": 1e-26},
        )
        cluster = RayVirtualCluster(
            bundle_ct_per_node_list=[1],
            use_gpus=False,
            num_gpus_per_node=1,
            max_colocated_worker_groups=1,
        )
        made = Policy(
            cluster=cluster,
            config=json.loads(json.dumps(config)),
            tokenizer=support.tokenizer(model),
            init_reference_model=False,
            **paths,
        )
        return cluster, made

    def report_of(made):
        (worker,) = made.worker_group.workers
        return ray.get(worker.__ray_call__.remote(report))

    def refused(made, method):
        """The driver's error for an argument that the worker's method does not have."""
        try:
            getattr(made.worker_group.workers[0], method).remote("a path", nonsense=1)
        except TypeError as error:
            return str(error)

    def train(made, seed):
        result = made.train(support.batch(8, seed), support.nll_loss(), gbs=8)
        metrics = result["all_mb_metrics"]
        return {
            "loss": result["loss"].tolist(),
            "grad_norm": float(result["grad_norm"]),
            "loss_scale": metrics.get("loss_scale"),
            "skipped_steps": metrics.get("skipped_steps"),
            "worker": report_of(made),
        }

    def close(cluster, made):
        made.shutdown()
        cluster.shutdown()

    # Ray itself starts the first worker. The others are forks of a process with imports.
    forked, found = os.environ[WORKER_PYTHON], {}
    for kind, python in zip(kinds, [sys.executable, forked][-len(kinds) :], strict=True):
        cluster, made = policy(kind, python)
        last = found[kind] = {
            "start": report_of(made),
            "refused": [refused(made, one) for one in ("save_checkpoint", "load_checkpoint")],
            "steps": [train(made, seed) for seed in range(2)],
        }
        print(f"SO FAR {json.dumps(found)}", flush=True)
        if kind != kinds[-1]:
            close(cluster, made)
    paths = {f"{name}_path": str(folder / name) for name in ("weights", "optimizer")}
    made.save_checkpoint(
        **paths,
        checkpointing_cfg={
            "enabled": True,
            "model_save_format": "safetensors",
            "save_consolidated": False,
            "is_async": False,
        },
    )
    last["files"] = sorted(one.name for one in (folder / "optimizer").iterdir())
    last["steps"].append(train(made, 2))
    close(cluster, made)
    cluster, made = policy(kinds[-1], forked, **paths)
    last["resumed"] = report_of(made)
    last["again"] = train(made, 2)
    close(cluster, made)
    found["told"] = lacking.without_the_package(
        told,
        lambda environment: RayWorkerBuilder.IsolatedWorkerInitializer.options(
            runtime_env=environment
        ).remote(name_of(kinds[-1])),
    )
    ray.shutdown()
    return found


if __name__ == "__main__":
    from tests.processes.ray_cluster import tell

    # After an error NeMo-RL's cluster object would start another Ray, and wait for it.
    tell(lambda: main(*map(Path, sys.argv[1:3]), sys.argv[3:]))
