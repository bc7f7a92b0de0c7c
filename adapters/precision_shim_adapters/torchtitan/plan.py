"""torchtitan's jobs, planned: its config by its own manager, its model on the meta device.

Other than the other frameworks', its configs are Python that imports torch. Everything that trains
is FSDP2 on torch's optimizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from precision_shim.adapting import version_of
from precision_shim.errors import PlanError
from precision_shim.planning.command import Job
from precision_shim.planning.request import Request
from precision_shim.planning.shapes import Model, Weight
from precision_shim.rules.dtypes import name_of, parse_dtype

from ..fp16.plan import Asked

_KEYS = {
    "world": "parallelism",
    "shards": "parallelism.data_parallel_shard_degree",
    "tensor": "parallelism.tensor_parallel_degree",
    "optimizer": "optimizer",
}


def plan(job: Job) -> Request:
    """Read a launch line of torchtitan's.

    Raises:
        PlanError: the config or the model cannot be read.
    """
    config = load(job)
    trainer = getattr(config, "trainer", config)  # the RL trainer's is within
    subject = "policy" if trainer is not config else "model"
    parallel, training = trainer.parallelism, trainer.training
    if parallel.pipeline_parallel_degree > 1:
        raise PlanError(
            f"{_where()}, parallelism.pipeline_parallel_degree="
            f"{parallel.pipeline_parallel_degree}: pipelines are not planned. Plan one stage's "
            "share with 1 on that many GPUs fewer."
        )
    world, shards = _world(job, parallel)
    asked = Asked(
        subject,
        _model(job, config),
        world,
        _name(training.dtype),
        shards=shards,
        tensor=parallel.tensor_parallel_degree,
        compute=_name(training.mixed_precision_param),
        reduce=_name(training.mixed_precision_reduce),
        optimizer=_optimizer(trainer.optimizer),
        offload=bool(training.enable_cpu_offload),
        gathers=1 if parallel.fsdp_reshard_after_forward == "never" else 2,
        keys=_KEYS,
    )
    return Request("torchtitan", version_of("torchtitan", ("torchtitan",)), world, (asked,))


def _where() -> str:
    return f"torchtitan {version_of('torchtitan', ('torchtitan',))}"


def load(job: Job) -> Any:
    """The config of a job, by torchtitan's own manager.

    Raises:
        PlanError: it cannot be read.
    """
    try:
        from torchtitan.config import ConfigManager

        return ConfigManager().parse_args(list(job.arguments))
    except (Exception, SystemExit) as error:  # tyro ends the process where a word is wrong
        text = " ".join(str(error).split())[:400]
        raise PlanError(
            f"{_where()}, {' '.join(job.arguments)}: {type(error).__name__}: {text}. Correct the "
            "arguments; a config of the RL trainer needs vLLM to be importable."
        ) from error


def _world(job: Job, parallel: Any) -> tuple[int, int]:
    """The GPUs of a job, and how many share a parameter."""
    replicas, shards = (
        parallel.data_parallel_replicate_degree,
        parallel.data_parallel_shard_degree,
    )
    rest = parallel.tensor_parallel_degree * parallel.context_parallel_degree * replicas
    each = job.launched("nproc-per-node")
    if each is not None:
        world = each * (job.launched("nnodes") or 1)
        if shards < 1:
            shards = max(world // rest, 1)
    else:
        shards = max(shards, 1)
        world = rest * shards
    return world, shards * parallel.context_parallel_degree


def _name(value: object) -> str:
    dtype = parse_dtype(str(value))
    if dtype is None:
        raise PlanError(f"{_where()}, training: {value!r} is no dtype. Write float32 or bfloat16.")
    return name_of(dtype)


def _optimizer(config: Any) -> str:
    """The optimizer of all parameter groups; the first that is not Adam's where there is one."""
    names = [
        str(found)
        for group in getattr(config, "param_groups", None) or ()
        if (found := getattr(group, "optimizer_name", None))
    ]
    names = names or [str(getattr(config, "name", "AdamW"))]
    return next((one for one in names if "adam" not in one.lower()), names[0])


def _model(job: Job, config: Any) -> Model:
    if job.options.parameters or job.options.model:
        return job.model(config.hf_assets_path)
    path = Path(config.hf_assets_path)
    if (path / "config.json").is_file():
        return job.model(path)
    spec = config.model_spec
    if spec is None:
        raise PlanError(f"{_where()}: the config names no model (model_spec). Name one.")
    return built(spec)


def built(spec: Any) -> Model:
    """Names and shapes of torchtitan's own model.

    Raises:
        PlanError: it cannot be built without its weights.
    """
    import torch

    try:
        with torch.device("meta"):
            model = spec.model.build()
    except Exception as error:  # a model's own code raises what it likes
        raise PlanError(
            f"{_where()}: its model cannot be built on the meta device "
            f"({type(error).__name__}: {error}). Name its size with --parameters."
        ) from error
    weights = tuple(Weight(name, tuple(one.shape)) for name, one in model.named_parameters())
    return Model(weights, _sizes(spec), "torchtitan's model, built on the meta device")


def _sizes(spec: Any) -> Mapping[str, Any]:
    heads = getattr(spec.model, "n_heads", None)
    return {"num_attention_heads": heads} if isinstance(heads, int) else {}
