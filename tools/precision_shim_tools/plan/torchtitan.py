"""Plan torchtitan's jobs: torchtitan loads the config and builds the model on the meta device.

Unlike other frameworks' configs, torchtitan's configs are Python code that imports torch. All
torchtitan models train on FSDP2 with torch's optimizers.
"""

from __future__ import annotations

import importlib
import io
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from precision_shim.adapting import versioned
from precision_shim.errors import DtypeError, PlanError
from precision_shim.precision.dtypes import name_of, parse_dtype
from precision_shim.precision.findings import Problem
from precision_shim_adapters.agreement.report import FEATURE
from precision_shim_adapters.torchtitan import config as reader
from precision_shim_adapters.torchtitan.config import FEATURE as COERCION
from precision_shim_adapters.torchtitan.rollout import dtypes
from precision_shim_adapters.torchtitan.training.trainers import NAMES, PRETRAINING, RL, ROLLOUT

from .command import Job
from .megatron.layout import layer_of
from .request import Request, read_request
from .rollout import listed, predict_sides
from .shapes import Model, Weight
from .torch_optimizer import ShardedModel, is_adam, learning_rate, scaling
from .values import one_line

_DEGREES = (
    *("data_parallel_replicate_degree", "tensor_parallel_degree", "context_parallel_degree"),
    *("expert_parallel_degree", "pipeline_parallel_degree"),
)
_KEYS = {
    "world": "parallelism",
    "tensor": "parallelism.tensor_parallel_degree",
    "optimizer": "optimizer",
    "dtype": "training.dtype=float32",
}
_OUTER = re.compile(r"(model\.|language_model\.)+")
_where = cache(partial(versioned, "torchtitan"))
_FRAME = re.compile(r"[\u2500-\u257f]+|-{3,}")
"""Matches the frame that tyro draws around a message."""


def plan_job(job: Job) -> Request:
    """Read a command line that launches a torchtitan job.

    Raises:
        PlanError: the config or the model cannot be read.
    """
    config, needs = load(job)
    trainer = getattr(config, "trainer", config)  # in RL the config contains the trainer's config
    subject, prefix = ("policy", "trainer.") if trainer is not config else ("model", "")
    world, shards = _world(job, prefix, trainer.parallelism)
    wrong = list(_dtypes(job, subject, config))
    notes = [needs, reader.find_unscaled(trainer.training, f"{prefix}training")]
    if trainer is not config and not wrong:
        wrong, of_sides = _both_sides(job, config)
        notes += of_sides
    readers = []
    if not any(problem.code == "dtype" for problem in wrong):
        readers.append((subject, partial(_model_of, job, config, prefix, world, shards)))
    rolls_out = trainer is not config
    return read_request(job, world, readers, wrong, filter(None, notes), rollout=rolls_out)


def _model_of(job: Job, config: Any, prefix: str, world: int, shards: int) -> ShardedModel:
    trainer = getattr(config, "trainer", config)
    parallel, training, model = trainer.parallelism, trainer.training, _model(job, config)
    compute, group = _name(training.mixed_precision_param), RL if prefix else PRETRAINING
    world //= parallel.pipeline_parallel_degree
    _check_model(prefix, parallel, config, model, world)
    return ShardedModel(
        "policy" if prefix else "model",
        model,
        world,
        _name(training.dtype),
        stages=stages_of(prefix, parallel, config.model_spec, model),
        shards=shards,
        tensor=parallel.tensor_parallel_degree,
        compute=compute,
        reduce=_name(training.mixed_precision_reduce),
        **_optimizer(trainer.optimizer),
        decisions=scaling(job, compute, group, reader.BECAUSE),
        offload=bool(training.enable_cpu_offload),
        wrote=reader.written(training, prefix),
        keys={name: prefix + key for name, key in _KEYS.items()},
        ends=_ends(job),
    )


def _ends(job: Job) -> str:
    """Why torchtitan itself refuses the arguments that the shim makes it take; empty if not."""
    names = (parse_dtype(word.rpartition("=")[2]) for word in job.arguments)
    if job.in_force(COERCION, NAMES) and any(names):
        try:
            load(job, strict_names=True)
        except PlanError as error:
            said = re.search(r"invalid choice .*?\)", str(error))
            return f"torchtitan's command line says: {said.group() if said else error}"
    return ""


def load(job: Job, *, strict_names: bool = False) -> tuple[Any, str]:
    """Load a job's config with torchtitan's config manager.

    ``strict_names``: accept only the names that torchtitan takes.

    Returns:
        The config, and the GPU that it needs; empty if torchtitan takes it on this machine.

    Raises:
        PlanError: torchtitan cannot load the config.
    """
    try:
        return _load(job, strict_names=strict_names), ""
    except PlanError:
        with newer_gpu() as asked:
            config = _load(job, strict_names=strict_names)
        major, minor = max(asked)
        return config, f"torchtitan refuses this config on GPUs older than sm_{major}{minor}"


@contextmanager
def newer_gpu() -> Iterator[list[tuple[int, int]]]:
    """Answer torchtitan's questions for a new GPU with yes; yields what it asked for."""
    from torchtitan.tools import utils

    original, asked = utils.has_cuda_capability, list[tuple[int, int]]()

    def has_cuda_capability(major: int, minor: int) -> bool:
        asked.append((major, minor))
        return True

    def swap(old: object, new: object) -> None:
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(original.__name__) is old:
                setattr(module, original.__name__, new)

    swap(original, has_cuda_capability)
    try:
        yield asked
    finally:
        swap(has_cuda_capability, original)


def _load(job: Job, *, strict_names: bool) -> Any:
    # Accept every spelling of a dtype, as names.parse_args does in the job.
    any_name = job.in_force(COERCION, NAMES) and not strict_names
    said, words = io.StringIO(), sys.argv
    try:
        sys.argv = [job.target]  # tyro's messages name it
        from torchtitan.config import ConfigManager

        with redirect_stderr(said), reader.any_name() if any_name else nullcontext():
            return ConfigManager().parse_args(list(job.arguments))
    except (Exception, SystemExit) as error:  # tyro raises SystemExit for a wrong argument
        ended = isinstance(error, SystemExit)
        cause = _cause(error) if isinstance(error, ImportError) else error
        framed = said.getvalue().partition("╭")[2] or said.getvalue()  # without earlier warnings
        text = one_line(_FRAME.sub(" ", framed if ended else str(cause)))
        raise PlanError(
            f"{_where()}, {' '.join(job.arguments)}: {type(cause).__name__}: {text}. Correct "
            "the arguments."
        ) from cause
    finally:
        sys.argv = words


def _cause(error: ImportError) -> ImportError:
    """Why torchtitan cannot import a job's configs: it says only which modules it tried."""
    tried, _, places = str(error).partition(" from ")
    name = "".join(re.findall(r"module '([\w.]+)'", tried))
    paths = [f"{place}.{name}.config_registry" for place in re.findall(r"torchtitan[\w.]+", places)]
    for path in (paths or [f"{name}.config_registry", name]) if name else ():
        try:
            importlib.import_module(path)
        except ImportError as one:  # noqa: PERF203
            if not f"{path}.".startswith(f"{one.name}."):  # the module imports what is missing
                return one
    return error


def _dtypes(job: Job, subject: str, config: Any) -> Iterator[Problem]:
    """Replace dtype names by torchtitan's, as in the job; yield a problem for unknown names."""
    if not job.in_force(COERCION, NAMES):
        return
    try:
        reader.coerce_config(config)
    except DtypeError as error:
        yield Problem.of(error, subject, error.key)


def _both_sides(job: Job, config: Any) -> tuple[list[Problem], list[str]]:
    """Predict the controller's report on the dtypes of trainer and generator."""
    if job.in_force(FEATURE, ROLLOUT):
        try:
            reader.generator_dtype_name(config.generator.model_dtype)
            dtypes.coerce_generator(config.generator)
        except DtypeError as error:
            return [Problem.of(error, "rollout", error.key)], []
    sides = dtypes.read_job(config, job.settings)
    return listed(predict_sides(job, sides, ROLLOUT)[0])


def _check_model(prefix: str, parallel: Any, config: Any, model: Model, world: int) -> None:
    """Check that the degrees split GPUs, experts and heads, which ``fp16.plan`` does not check."""
    heads, experts = "tensor_parallel_degree", "expert_parallel_degree"
    within = world // parallel.data_parallel_replicate_degree  # ``world``: of a pipeline stage
    routed = [weight.shape[0] for weight in model.weights if ".routed_experts." in weight.name]
    counts = [(experts, within, "GPUs of a replica")]
    counts += [(experts, count, "experts") for count in (model.experts, *routed)]
    if not model.config and config.model_spec is not None:
        attention = getattr(config.model_spec.model, "first_attention", None)
        for name in ("n_heads", "n_kv_heads"):
            counts += [(heads, getattr(attention, name, None) or 0, name)]
    for key, count, what in counts:
        if count % getattr(parallel, key):
            raise _no_layout(prefix, parallel, key, f"it does not divide {count} {what}")


def _no_layout(prefix: str, parallel: Any, key: str, fault: str) -> PlanError:
    return PlanError(
        f"{_where()}, {prefix}parallelism.{key}={getattr(parallel, key)}: the job's layout cannot "
        f"be computed: {fault}. Write a size that goes."
    )


def _world(job: Job, prefix: str, parallel: Any) -> tuple[int, int]:
    """Number of GPUs, to which the degrees must multiply, and of ranks that shard a parameter."""
    for key in _DEGREES:
        if getattr(parallel, key) < 1:
            raise _no_layout(prefix, parallel, key, "it is less than 1")
    tensor, context = parallel.tensor_parallel_degree, parallel.context_parallel_degree
    rest = tensor * context * parallel.data_parallel_replicate_degree
    rest *= parallel.pipeline_parallel_degree
    shards, world = parallel.data_parallel_shard_degree, job.processes
    if shards < 1:
        shards = 1 if world is None else max(world // rest, 1)
    if world not in (None, rest * shards):
        fault = f"the degrees multiply to {rest * shards} GPUs, and the job has {world}"
        raise _no_layout(prefix, parallel, "data_parallel_shard_degree", fault)
    return rest * shards, shards * context


def stages_of(prefix: str, parallel: Any, spec: Any, model: Model) -> tuple[Model, ...]:
    """The parts of a model on each rank of a pipeline, split as torchtitan splits its models.

    What torchtitan's split does not name, such as a vision tower, is in the first stage. A model
    without layers, which only has a size, is split evenly.
    """
    degree: int = parallel.pipeline_parallel_degree
    if degree == 1:
        return ()
    made = getattr(spec and spec.pipelining_fn, "__module__", "")
    if not made or "transformers" in made:  # the latter splits by other names
        fault = f"how {made or 'this model'} splits a model into stages is not known here"
        raise _no_layout(prefix, parallel, "pipeline_parallel_degree", fault)
    from torchtitan.distributed import pipeline_parallel as split

    try:
        asked = split._get_pipeline_metadata(SimpleNamespace(pp=degree), parallel, spec.model)
        named = parallel.module_fqns_per_model_part or split._generate_llm_fqn_per_model_part(
            *asked
        )
        schedule = (degree, parallel.pipeline_parallel_schedule, len(named))
        held = [
            split._get_pp_rank_to_stage_indices_mapping(one, *schedule) for one in range(degree)
        ]
    except (AssertionError, ValueError) as error:
        key = "pipeline_parallel_degree"
        raise _no_layout(prefix, parallel, key, one_line(str(error))) from error
    if not any(layer_of(weight.name) is not None for weight in model.weights):
        even = (Weight(one.name, (-(-one.numel // degree),)) for one in model.weights)
        return (replace(model, weights=tuple(even)),) * degree
    stage_of = {name: place for place, names in enumerate(named) for name in names}
    rank_of = {stage: rank for rank, stages in enumerate(held) for stage in stages}
    parts: list[list[Weight]] = [[] for _ in range(degree)]
    for weight in model.weights:
        layer, name = layer_of(weight.name), _OUTER.sub("", weight.name).partition(".")[0]
        stage = stage_of.get(name if layer is None else f"layers.{layer}", 0)
        parts[rank_of[stage]].append(weight)
    return tuple(replace(model, weights=tuple(part)) for part in parts)


def _name(value: object) -> str:
    dtype = parse_dtype(str(value))
    if dtype is None:
        raise PlanError(f"{_where()}, training: {value!r} is no dtype. Write float32 or bfloat16.")
    return name_of(dtype)


def _optimizer(config: Any) -> dict[str, Any]:
    """The first optimizer whose states have no rule here, or else the first; and the least lr."""
    groups = getattr(config, "param_groups", None) or ()
    found = [(group.optimizer_name, group.optimizer_kwargs) for group in groups]
    found = found or [(str(getattr(config, "name", "AdamW")), {})]
    name, options = next((each for each in found if not is_adam(*each)), found[0])
    low = getattr(config, "implementation", "") == "fused_opt_states_bf16"
    rates = [learning_rate(options) for _, options in found]
    return {
        "optimizer": name,
        "options": options,
        "moments": "bf16" if low else "",
        "lr": min(rates),
    }


def _model(job: Job, config: Any) -> Model:
    path = Path(config.hf_assets_path)
    named = job.options.parameters or job.options.model
    if named or (path / "config.json").is_file():
        return job.model(path)
    if config.model_spec is None:
        raise PlanError(f"{_where()}: the config names no model (model_spec). Name one.")
    return built(config.model_spec)


def built(spec: Any) -> Model:
    """Names and shapes of the weights of torchtitan's model.

    Raises:
        PlanError: the model cannot be built on the meta device.
    """
    import torch

    try:
        with torch.device("meta"):
            model = spec.model.build()
    except Exception as error:  # a model's code may raise any error
        raise PlanError(
            f"{_where()}: its model cannot be built on the meta device "
            f"({type(error).__name__}: {error}). Name its size with --parameters."
        ) from error
    weights = (
        Weight(name, tuple(one.shape), trains=one.requires_grad)
        for name, one in model.named_parameters()
    )
    return Model(tuple(weights), {}, "torchtitan's model, built on the meta device")
