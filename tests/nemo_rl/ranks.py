"""The processes that train a worker together; ``tests/rank_server.py`` starts them.

Options of a launch: ``kind``, ``model``, ``on``, and ``dtensor``, keys of the config's
``dtensor_cfg``. The case is ``train``; there is no other.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from ..rank_server import Launch

IMPORTED = (
    *("torch._inductor.compile_fx", "torch.distributed.fsdp", "torch.distributed.checkpoint"),
    *("torchao", "torchvision", "transformers.modeling_layers", "transformers.video_utils"),
    *("accelerate", "datasets", "fastapi", "hydra", "matplotlib.pyplot", "mlflow", "pandas"),
    *("ray", "scipy.optimize", "swanlab", "tensordict", "wandb"),
)
"""What takes longest of what NeMo-RL's workers import. NeMo-RL itself and its nemo_automodel are
left to each rank: the shim is to be there before them."""


def prepare() -> None:
    """Import what is not NeMo-RL's own, in the server."""
    for name in IMPORTED:
        importlib.import_module(name)


def run(launch: Launch) -> dict[str, Any]:
    """Train four steps, of which the second overflows on the last rank alone; resume the last."""
    import torch

    import precision_shim

    given, rank, world_size = launch.options, launch.rank, launch.world
    kind, folder = given["kind"], Path(launch.folder)
    if given["on"]:
        precision_shim.install(settings={"growth_interval": 2, "log": "quiet"})
    from precision_shim.testing.nemo_rl_cpu import nemo_rl_on_cpu

    from . import support
    from .test_training import Times

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
        scaler = support.scaler_of(worker)
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
