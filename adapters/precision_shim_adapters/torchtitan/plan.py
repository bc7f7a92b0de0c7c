"""Plan torchtitan's jobs: torchtitan loads the config and builds the model on the meta device.

Unlike other frameworks' configs, torchtitan's configs are Python code that imports torch. All
torchtitan models train on FSDP2 with torch's optimizers.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

from precision_shim.adapting import version_of
from precision_shim.errors import DtypeError, PlanError
from precision_shim.planning.command import Job
from precision_shim.planning.record import Problem, too_small, whole_heads
from precision_shim.planning.request import Request
from precision_shim.planning.shapes import Model, Weight
from precision_shim.precision.dtypes import name_of, parse_dtype

from ..fp16.plan import ShardedModel, scaling
from ..rollout import FEATURE, problems_of, problems_of_heads
from . import head, names, sides
from .places import NAMES, PRETRAINING, RL, ROLLOUT
from .scaled import BECAUSE

_KEYS = {
    "world": "parallelism",
    "shards": "parallelism.data_parallel_shard_degree",
    "tensor": "parallelism.tensor_parallel_degree",
    "optimizer": "optimizer",
}
_DEGREES = (
    "data_parallel_replicate_degree",
    "tensor_parallel_degree",
    "context_parallel_degree",
    "pipeline_parallel_degree",
    "expert_parallel_degree",
)
_EXPERTS = ".routed_experts."
"""Part of the names of routed experts' weights, whose dimension 0 is the number of experts."""
_FRAME = re.compile(r"[\u2500-\u257f]+|-{3,}")
"""Matches the frame that tyro draws around a message."""


def plan_job(job: Job) -> Request:
    """Read a command line that launches a torchtitan job.

    Raises:
        PlanError: the config or the model cannot be read.
    """
    config = load(job)
    trainer = getattr(config, "trainer", config)  # in RL the config contains the trainer's config
    subject, prefix = ("policy", "trainer.") if trainer is not config else ("model", "")
    group = PRETRAINING if trainer is config else RL
    parallel, training = trainer.parallelism, trainer.training
    if parallel.pipeline_parallel_degree > 1:
        raise PlanError(
            f"{_where()}, {prefix}parallelism.pipeline_parallel_degree="
            f"{parallel.pipeline_parallel_degree}: pipelines are not planned. Plan one stage's "
            "share with 1 on that many GPUs fewer."
        )
    version = version_of("torchtitan", ("torchtitan",))
    wrong = list(_small(subject, prefix, parallel))
    if wrong:
        world = _count_launched(job) or 1
        return Request("torchtitan", version, world, (), problems=tuple(wrong))
    world, shards = _world(job, parallel)
    wrong = [*_apart(subject, prefix, parallel, world), *_dtypes(job, subject, config, trainer)]
    if trainer is config and training.local_batch_size < 1:
        wrong.append(too_small(subject, "training.local_batch_size", training.local_batch_size))
    notes: list[str] = []
    if trainer is not config and not any(problem.code == "dtype" for problem in wrong):
        problems, notes = _both_sides(job, config)
        wrong += problems
    if any(problem.code == "dtype" for problem in wrong):
        return Request("torchtitan", version, world, (), problems=tuple(wrong))
    model = _model(job, config)
    wrong += _heads(subject, prefix, parallel, config, model)
    wrong += _experts(subject, prefix, parallel, model)
    compute = _name(training.mixed_precision_param)
    asked = ShardedModel(
        subject,
        model,
        world,
        _name(training.dtype),
        shards=shards,
        tensor=parallel.tensor_parallel_degree,
        compute=compute,
        reduce=_name(training.mixed_precision_reduce),
        optimizer=_optimizer(trainer.optimizer),
        decisions=scaling(job, compute, group, BECAUSE),
        offload=bool(training.enable_cpu_offload),
        gathers=1 if parallel.fsdp_reshard_after_forward == "never" else 2,
        keys={name: prefix + key for name, key in _KEYS.items()},
    )
    return Request(
        "torchtitan", version, world, (asked,), problems=tuple(wrong), notes=tuple(notes)
    )


def _where() -> str:
    return f"torchtitan {version_of('torchtitan', ('torchtitan',))}"


def load(job: Job) -> Any:
    """Load a job's config with torchtitan's own config manager.

    Raises:
        PlanError: torchtitan cannot load the config.
    """
    said = io.StringIO()
    # Accept every spelling of a dtype, as names.parse_args does in the job.
    spellings = names.any_name if _coerces(job) else nullcontext
    try:
        from torchtitan.config import ConfigManager

        with redirect_stderr(said), spellings():
            return ConfigManager().parse_args(list(job.arguments))
    except (Exception, SystemExit) as error:  # tyro raises SystemExit for a wrong argument
        ended = isinstance(error, SystemExit)
        text = " ".join(_FRAME.sub(" ", said.getvalue() if ended else str(error)).split())
        missing = isinstance(error, ImportError)
        more = "; a config of the RL trainer needs vLLM to be importable" if missing else ""
        raise PlanError(
            f"{_where()}, {' '.join(job.arguments)}: {type(error).__name__}: {text[:600]}. Correct "
            f"the arguments{more}."
        ) from error


def _coerces(job: Job) -> bool:
    return job.in_force(names.FEATURE, NAMES)


def _small(subject: str, prefix: str, parallel: Any) -> Iterator[Problem]:
    """Yield a problem for each parallel degree below 1, which leaves the number of GPUs unknown."""
    for name in _DEGREES:
        value = getattr(parallel, name)
        if value < 1:
            key = f"{prefix}parallelism.{name}"
            yield too_small(subject, key, value)
    shards = parallel.data_parallel_shard_degree
    if shards < 1 and shards != -1:
        more = ", or -1 for all that are left"
        yield too_small(subject, f"{prefix}{_KEYS['shards']}", shards, more)


def _dtypes(job: Job, subject: str, config: Any, trainer: Any) -> Iterator[Problem]:
    """Replace dtype names by torchtitan's own, as in the job; yield a problem for unknown names."""
    if not _coerces(job):
        return
    try:
        names.coerce_training(trainer.training)
    except DtypeError as error:
        match = re.search(r"training\.\w+(?==)", str(error))
        key = error.key or (match.group() if match else "training.dtype")
        yield Problem.of(error, subject, key if trainer is config else f"trainer.{key}")


def _both_sides(job: Job, config: Any) -> tuple[list[Problem], list[str]]:
    """Predict the controller's report on the dtypes of trainer and generator."""
    on = job.in_force(FEATURE, ROLLOUT)
    if on:
        try:
            sides.generator_dtype_name(config.generator.model_dtype)
            sides.coerce_generator(config.generator)
        except DtypeError as error:
            return [Problem.of(error, "rollout", error.key)], []
    problems, notes = problems_of_heads(
        _where(), partial(head.read_heads, config), job.settings, on=on
    )
    both = sides.engines(config.trainer.training, config.generator.model_dtype)
    if both is None:
        return problems, notes
    trainer, rollout = both
    found, told = problems_of(_where(), trainer, [rollout], job.settings, on=on)
    return [*found, *problems], [*told, *notes]


def _apart(subject: str, prefix: str, parallel: Any, world: int) -> Iterator[Problem]:
    """Yield a problem if the parallel degrees do not multiply to the number of GPUs.

    ``fp16.plan.problems`` reports a number of GPUs that is no multiple of the degrees.
    """
    replicas, tensor = parallel.data_parallel_replicate_degree, parallel.tensor_parallel_degree
    context, shards = parallel.context_parallel_degree, parallel.data_parallel_shard_degree
    rest = replicas * context * tensor
    if shards > 0 and world % rest == 0 and world != rest * shards:
        yield Problem(
            "world-size",
            subject,
            f"{prefix}{_KEYS['shards']}",
            f"replicas {replicas} x shards {shards} x context {context} x tensor {tensor} make "
            f"{rest * shards} GPUs, and the job has {world}",
            f"Write {world // rest}, or -1 for all that are left.",
        )
    experts, within = parallel.expert_parallel_degree, world // replicas
    if within % experts:
        yield Problem(
            "world-size",
            subject,
            f"{prefix}parallelism.expert_parallel_degree",
            f"{within} GPUs of a replica are not a multiple of {experts}",
            f"Take a divisor of {within}.",
        )


def _heads(
    subject: str, prefix: str, parallel: Any, config: Any, model: Model
) -> Iterator[Problem]:
    if model.config or config.model_spec is None:
        return
    attention = getattr(config.model_spec.model, "first_attention", None)
    for name in ("n_heads", "n_kv_heads"):
        heads = getattr(attention, name, None)
        if isinstance(heads, int):
            ways, key = parallel.tensor_parallel_degree, f"{prefix}{_KEYS['tensor']}"
            yield from whole_heads(subject, key, name, heads, ways)


def _experts(subject: str, prefix: str, parallel: Any, model: Model) -> Iterator[Problem]:
    ways = parallel.expert_parallel_degree
    counts = {model.experts} if model.config else set()
    counts |= {weight.shape[0] for weight in model.weights if _EXPERTS in weight.name}
    for experts in sorted(counts):
        if experts % ways:
            yield Problem(
                "experts",
                subject,
                f"{prefix}parallelism.expert_parallel_degree",
                f"{experts} experts cannot be spread over {ways} ranks",
                f"Take a divisor of {experts}.",
            )


def _count_launched(job: Job) -> int | None:
    each = job.launched("nproc-per-node")
    return None if each is None else each * (job.launched("nnodes") or 1)


def _world(job: Job, parallel: Any) -> tuple[int, int]:
    """The number of GPUs of a job, and the number of ranks that shard a parameter."""
    replicas, shards = (
        parallel.data_parallel_replicate_degree,
        parallel.data_parallel_shard_degree,
    )
    rest = parallel.tensor_parallel_degree * parallel.context_parallel_degree * replicas
    world = _count_launched(job)
    if world is not None:
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
    """Name of the first optimizer that is not Adam; the first name if all are Adam."""
    names = [
        str(named)
        for group in getattr(config, "param_groups", None) or ()
        if (named := getattr(group, "optimizer_name", None))
    ]
    names = names or [str(getattr(config, "name", "AdamW"))]
    return next((name for name in names if "adam" not in name.lower()), names[0])


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
    """Names and shapes of the weights of torchtitan's own model.

    Raises:
        PlanError: the model cannot be built on the meta device, or has frozen parameters.
    """
    import torch

    try:
        with torch.device("meta"):
            model = spec.model.build()
    except Exception as error:  # a model's own code may raise any error
        raise PlanError(
            f"{_where()}: its model cannot be built on the meta device "
            f"({type(error).__name__}: {error}). Name its size with --parameters."
        ) from error
    weights = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            raise PlanError(
                f"{_where()}: {name} of its model is frozen, as beside LoRA adapters, which are "
                "not planned: their states are small, and the frozen model keeps its parameters "
                "alone. Plan the config without the converter for an upper bound."
            )
        weights.append(Weight(name, tuple(parameter.shape)))
    return Model(tuple(weights), {}, "torchtitan's model, built on the meta device")
