"""One of the processes that train a worker together; ``test_ranks.py`` starts them.

Arguments: a JSON object with ``kind``, ``model``, ``folder``, ``rank``, ``world_size``, ``on`` and
``dtensor``, keys of the config's ``dtensor_cfg``.
Prints one line.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any


def main(given: dict[str, Any]) -> dict[str, Any]:
    """Train four steps, of which the second overflows on the last rank alone; resume the last."""
    import torch

    import precision_shim

    if given["on"]:
        precision_shim.install(settings={"growth_interval": 2, "log": "quiet"})
    from precision_shim.testing.nemo_rl_cpu import nemo_rl_on_cpu
    from tests.nemo_rl import support
    from tests.nemo_rl.test_training import Times

    kind, rank, folder = given["kind"], given["rank"], Path(given["folder"])
    world_size = given["world_size"]
    config = support.policy_config(Path(given["model"]), "float16", kind)
    config["dtensor_cfg"] |= given["dtensor"]
    tensor_parallel = config["dtensor_cfg"]["tensor_parallel_size"]
    config["make_sequence_length_divisible_by"] = tensor_parallel
    shards = world_size // tensor_parallel

    def train(worker: Any, step: int) -> dict[str, Any]:
        factor = 1e30 if step == 1 and rank == world_size - 1 else 1.0
        size, mine = 4 // shards, rank // tensor_parallel
        data = support.batch(4, step).slice(mine * size, (mine + 1) * size)
        result = worker.train(data, Times(support.loss_for(kind), factor), gbs=4, mbs=1)
        scaler = worker.__dict__.get("_precision_shim_scaler")
        metrics = result["all_mb_metrics"]
        return {
            "norm": str(float(result["grad_norm"])),
            "metrics": [metrics.get(name) for name in ("loss_scale", "skipped_steps")],
            "scale": scaler and scaler.get_scale(),
            "skipped": scaler and scaler.counter.skipped,
        }

    found: dict[str, Any] = {}
    with nemo_rl_on_cpu(world_size, rank, str(folder / "meet")):
        worker = support.make_worker(kind, config)
        found["steps"] = [train(worker, step) for step in range(3)]
        support.save(worker, folder)
        found["steps"].append(train(worker, 3))
        values = support.parameters(worker)
    found["finite"] = all(bool(torch.isfinite(one).all()) for one in values.values())
    found["parameters"] = {name: one.double().tolist() for name, one in values.items()}
    with nemo_rl_on_cpu(world_size, rank, str(folder / "meet again")):
        paths = {f"{name}_path": str(folder / name) for name in ("weights", "optimizer")}
        worker = support.make_worker(kind, config, **paths)
        found["resumed"] = train(worker, 3)
        again = support.parameters(worker)
        found["same"] = all(torch.equal(values[name], again[name]) for name in values)
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print("FOUND " + json.dumps(main(json.loads(sys.argv[1]))), flush=True)
