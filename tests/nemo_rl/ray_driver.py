"""A NeMo-RL driver: a policy of real workers in a real local Ray cluster; prints the results.

Run as a script, because workers inherit the driver's environment. Arguments: the kind of worker, a
folder with a model, a folder for checkpoints, the precision.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")


RANKS = 2


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


def main(kind: str, model: Path, folder: Path, precision: str) -> dict[str, object]:
    """Train with an overflow, save, train a fourth step; resume in new actors and repeat step 4."""
    import ray

    from tests.nemo_rl import support
    from tests.processes.forks import WORKER_PYTHON
    from tests.processes.ray_cluster import start

    fqn = support.NAMES[kind].replace(":", ".")
    start(4)
    from nemo_rl.distributed import ray_actor_environment_registry as registry
    from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
    from nemo_rl.models.policy.lm_policy import Policy

    def run_by(python):
        registry.ACTOR_ENVIRONMENT_REGISTRY[fqn] = python  # keeps NeMo-RL from calling uv

    config = support.policy_config(
        model,
        precision,
        kind,
        # The first step overflows; backoff_factor then lowers the scale to a value that fits fp16.
        precision_shim={"loss_scale_init": 1e30, "backoff_factor": 1e-26},
    )

    def policy(**paths):
        cluster = RayVirtualCluster(
            bundle_ct_per_node_list=[RANKS],
            use_gpus=False,
            num_gpus_per_node=RANKS,
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

    def reports(made):
        workers = made.worker_group.workers
        return ray.get([one.__ray_call__.remote(report) for one in workers])

    def refused(made, method):
        """The driver's error for an argument that the worker's method does not have."""
        try:
            getattr(made.worker_group.workers[0], method).remote("a path", nonsense=1)
        except TypeError as error:
            return str(error)

    def note(what):
        print(f"SO FAR {what} {json.dumps(found)}", flush=True)

    def train(made, seed):
        result = made.train(support.batch(8, seed), support.loss_for(kind), gbs=8)
        metrics = result["all_mb_metrics"]
        return {
            "loss": result["loss"].tolist(),
            "grad_norm": float(result["grad_norm"]),
            "loss_scale": metrics.get("loss_scale"),
            "skipped_steps": metrics.get("skipped_steps"),
            "workers": reports(made),
        }

    # In one case Ray starts the workers. Other workers are forks of a process with imports.
    forked = os.environ[WORKER_PYTHON]
    run_by(sys.executable if kind == "v1" and "PRECISION_SHIM" in os.environ else forked)
    cluster, first = policy()
    found: dict[str, object] = {"start": reports(first)}
    found["refused"] = [refused(first, one) for one in ("save_checkpoint", "load_checkpoint")]
    found["steps"] = [train(first, seed) for seed in range(3)]
    first.save_checkpoint(
        weights_path=str(folder / "weights"),
        optimizer_path=str(folder / "optimizer"),
        checkpointing_cfg={
            "enabled": True,
            "model_save_format": "safetensors",
            "save_consolidated": False,
            "is_async": False,
        }
        if kind != "v1"
        else None,
    )
    found["files"] = sorted(one.name for one in (folder / "optimizer").iterdir())
    found["on"] = train(first, 3)
    note("trained")
    first.shutdown()
    cluster.shutdown()
    run_by(forked)
    cluster, second = policy(
        weights_path=str(folder / "weights"), optimizer_path=str(folder / "optimizer")
    )
    found["resumed"] = reports(second)
    found["again"] = train(second, 3)
    second.shutdown()
    cluster.shutdown()
    ray.shutdown()
    return found


if __name__ == "__main__":
    from tests.processes.ray_cluster import tell

    kind, model, folder, precision = sys.argv[1:]
    # After an error NeMo-RL's cluster object would start another Ray, and wait for it.
    tell(lambda: main(kind, Path(model), Path(folder), precision))
