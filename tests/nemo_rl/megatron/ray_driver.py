"""A driver with one real Megatron worker in a real local Ray cluster; prints its results.

Run as a script, because workers inherit the driver's environment. Arguments: a folder with a
model, an empty folder.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")


def report(self: Any) -> dict[str, Any]:
    """Report a worker's seams, dtypes and NaN check; runs in the actor."""
    import os

    import precision_shim
    from tests.processes.loaded_tools import loaded_tools

    framework = precision_shim.status().frameworks.get("nemo-rl")
    seams = framework.seams if framework else ()
    return {
        "pid": os.getpid(),
        "mro": [f"{one.__module__}.{one.__qualname__}" for one in type(self).__mro__],
        "wrapped": sorted({seam.target for seam in seams if seam.state == "wrapped"}),
        "params_dtype": str(self.megatron_cfg.optimizer.params_dtype),
        "check": self.model.ddp_config.check_for_nan_in_grad,
        "tools": loaded_tools(),
    }


def main(model: Path, folder: Path) -> dict[str, Any]:
    """Convert the model in this process, then make a worker from the actor class and train it."""
    import ray

    from tests.nemo_rl.megatron import support
    from tests.nemo_rl.support import batch, nll_loss
    from tests.processes.forks import WORKER_PYTHON
    from tests.processes.ray_cluster import start

    support.import_worker_modules()
    config = support.policy_config(
        model, "float16", optimizer={**support.FP16, "initial_loss_scale": 2.0**30, "hysteresis": 1}
    )
    with support.harness(folder):
        support.convert(config, folder)
    os.environ["NEMO_RL_TEST_CONVERTED"] = str(folder)
    start(
        2,
        runtime_env={
            "worker_process_setup_hook": "tests.nemo_rl.megatron.support.stay_on_cpu",
            "py_executable": os.environ[WORKER_PYTHON],
        },
    )
    module, _, name = support.POLICY.partition(":")
    actor_class = getattr(importlib.import_module(module), name)
    worker = actor_class.options(num_gpus=0, runtime_env={}).remote(
        config, **support.arguments(config)
    )
    found: dict[str, Any] = {"pid": os.getpid(), "steps": []}
    found["worker"] = ray.get(worker.__ray_call__.remote(report))
    try:
        for seed in range(2):
            result = ray.get(worker.train.remote(data=batch(seed=seed), loss_fn=nll_loss()))
            metrics = result["all_mb_metrics"]
            found["steps"].append(
                {
                    "grad_norm": float(result["grad_norm"]),
                    "loss_scale": metrics.get("loss_scale"),
                    "skipped_steps": metrics.get("skipped_steps"),
                }
            )
        found["end"] = ray.get(worker.__ray_call__.remote(report))
    except ray.exceptions.RayTaskError as error:
        found["error"] = str(error)[-2000:]
    ray.shutdown()
    return found


if __name__ == "__main__":
    from tests.nemo_rl.cpu import config_modules_pickle

    with config_modules_pickle():
        print("FOUND", json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]))))
