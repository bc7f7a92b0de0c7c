"""The rank processes of the NeMo-RL tests; ``tests/processes/rank_server.py`` starts them.

Cases: ``train`` trains a worker on several ranks; ``unpickle`` loads a pickle as a Ray actor does;
``tests/processes/forks.py`` explains ``module``, ``script`` and ``tests``.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from ..processes.forks import module, script, tests
from ..processes.rank_server import Launch, freeze

__all__ = ["module", "prepare", "script", "tests", "train", "unpickle"]

IMPORTED = (
    *("torch._inductor.compile_fx", "torch.distributed.fsdp", "torch.distributed.checkpoint"),
    *("torchao", "torchvision", "transformers.modeling_layers", "transformers.video_utils"),
    *("accelerate", "datasets", "fastapi", "hydra", "matplotlib.pyplot", "mlflow", "pandas"),
    *("peft", "scipy.optimize", "scipy.stats", "swanlab", "tensordict", "wandb"),
    *("torch.utils.tensorboard", "torch.distributed.pipelining"),
)
"""The slowest imports of NeMo-RL's workers. NeMo-RL, nemo_automodel, Megatron and Ray are not in
the list, because the shim must be installed before their import."""


def prepare() -> None:
    """Import ``IMPORTED`` in the server."""
    for name in IMPORTED:
        importlib.import_module(name)


def unpickle(launch: Launch) -> list[str]:
    """Import a worker's module and load the worker's class as a Ray actor does, without the shim.

    Options: ``target``, the name of the class, and ``file``, the path of the pickle.
    """
    from .cpu import nemo_rl_on_cpu

    with nemo_rl_on_cpu():
        import cloudpickle

        import precision_shim  # noqa: F401

        importlib.import_module(launch.options["target"].partition(":")[0])
        worker = cloudpickle.loads(Path(launch.options["file"]).read_bytes())
        assert worker.train
        return [one.__name__ for one in worker.__mro__]


def train(launch: Launch) -> dict[str, Any]:
    """Train workers, one after the other; returns the results by name.

    Option ``jobs``: kind, path of the model and keys of the config's ``dtensor_cfg``, by name.
    """
    import precision_shim

    precision_shim.install(settings={"growth_interval": 2, "log": "quiet"})
    return {
        name: _train(launch, *job, Path(launch.folder) / name.replace(" ", "_"))
        for name, job in launch.options["jobs"].items()
    }


def _train(
    launch: Launch, kind: str, model: str, dtensor: dict[str, Any], folder: Path
) -> dict[str, Any]:
    """Train four steps, resume, repeat the fourth step; the last rank alone overflows in step 2."""
    import torch

    from . import support
    from .cpu import nemo_rl_on_cpu
    from .test_training import Times

    rank, world_size = launch.rank, launch.world
    folder.mkdir(exist_ok=True)
    config = support.policy_config(Path(model), "float16", kind)
    config["dtensor_cfg"] |= dtensor
    tensor_parallel = config["dtensor_cfg"]["tensor_parallel_size"]
    config["make_sequence_length_divisible_by"] = tensor_parallel
    shards = world_size // tensor_parallel

    def one_step(worker: Any, step: int) -> dict[str, Any]:
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
        support.actor_class(kind)
        freeze()
        worker = support.make_worker(kind, config)
        found["steps"] = [one_step(worker, step) for step in range(3)]
        support.save(worker, folder)
        found["steps"].append(one_step(worker, 3))
        values = support.parameters(worker)
    found["finite"] = all(bool(torch.isfinite(one).all()) for one in values.values())
    found["parameters"] = {name: one.double().tolist() for name, one in values.items()}
    with nemo_rl_on_cpu(world_size, rank, str(folder / "meet again")):
        paths = {f"{name}_path": str(folder / name) for name in ("weights", "optimizer")}
        worker = support.make_worker(kind, config, **paths)
        found["resumed"] = one_step(worker, 3)
        again = support.parameters(worker)
        found["same"] = all(torch.equal(values[name], again[name]) for name in values)
    return found
