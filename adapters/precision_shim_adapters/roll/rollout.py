"""The dtypes in which the trainer, the reference model and the rollout of a ROLL job compute.

Each of ROLL's workers has a dtype of its own. A pipeline is the driver.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from precision_shim.adapting import Call, seam, versioned
from precision_shim.adapting.dtypes import name_of, parse_dtype
from precision_shim.adapting.rollouts import AUTO, Engine

from ..agreement.lm_head import of_rollout, unchanged_heads
from ..agreement.model_files import gates_of, resolve_by_model
from ..agreement.names import with_rounded, write_key
from ..agreement.report import FEATURE, Sides, report_sides
from ..megatron.policy.formats import read_format

GROUP = "rollout"
_ENGINES = ("vllm", "sglang")
_NAMES = {name: name for name in ("fp16", "bf16", "fp32")}
_KEY, _GIVEN = "model_args.dtype", "strategy_args.strategy_config"


def read_sides(config: Any) -> Sides | None:
    """Read both sides of a pipeline; ``None`` if it trains no policy."""
    trainer = _engine(config, "actor_train", "actor")
    if trainer is None:
        return None
    others = [_engine(config, "actor_infer", "rollout")]
    if getattr(config, "enable_reference", True):
        others.append(_engine(config, "reference", "ref"))
    found = list(filter(None, others))
    train, infer = config.actor_train, getattr(config, "actor_infer", None)
    served = getattr(infer, "strategy_args", None)
    backend, given = ("", {}) if served is None else (served.strategy_name, served.strategy_config)
    rollout = of_rollout(backend, given or {}, f"actor_infer.{_GIVEN}")
    heads = unchanged_heads("actor", "ROLL", [rollout])
    own, path = train.strategy_args, str(train.model_args.model_name_or_path)
    on_megatron = trainer if own.strategy_name.startswith("megatron") else None
    fields, place = _fields(own), f"actor_train.{_GIVEN}.{{}}"
    gates = gates_of(on_megatron, found, backend, path, fields, place=place)
    return Sides("roll", versioned("roll"), trainer, found, heads, gates=gates)


def _fields(strategy: Any) -> dict[str, Any]:
    """The fields of Megatron's config in a worker's strategy."""
    given = strategy.strategy_config or {}
    more = given.get("additional_configs")  # or the path of a file on the workers' machine
    return {**(more if isinstance(more, dict) else {}), **given}


def _engine(config: Any, key: str, subject: str) -> Engine | None:
    worker = getattr(config, key, None)
    strategy = getattr(worker, "strategy_args", None)
    if worker is None or strategy is None:
        return None
    name, given = strategy.strategy_name, strategy.strategy_config or {}
    where, place, format = f"{key}.{_KEY}", f"{key}.{_GIVEN}", None
    written: Any = worker.model_args.dtype
    if name.startswith("fsdp2"):
        where = f"{place}.param_dtype"
        written = given.get("param_dtype", "bf16")
    elif name.startswith("megatron"):
        values = {"fp16": worker.training_args.fp16, "bf16": worker.training_args.bf16, **given}
        written = "fp16" if values["fp16"] else "bf16" if values["bf16"] else "fp32"
        format = read_format(_fields(strategy), f"{place}.{{}}")
    dtype = parse_dtype(str(written))
    if dtype is None and name not in _ENGINES:  # such as null, for the checkpoint's dtype
        return None
    computes = AUTO if dtype is None else name_of(dtype)
    engine = Engine(subject, computes, where, written, values=_NAMES, format=format)
    if name not in _ENGINES:
        return engine
    engine = resolve_by_model(engine, name, str(worker.model_args.model_name_or_path))
    return with_rounded(engine, given, place, name)


def _write(config: Any, key: str, value: str) -> None:
    write_key(config, key, value)
    worker = getattr(config, key.partition(".")[0])
    if key.endswith(_KEY):  # ROLL has already made these values from the key
        worker.model_args.compute_dtype = parse_dtype(value)
        for flags in (vars(worker.training_args), worker.strategy_args.strategy_config or {}):
            flags.update({name: name == value for name in ("fp16", "bf16") if name in flags})


@seam(
    "roll.pipeline.base_pipeline:BasePipeline.__init__",
    FEATURE,
    group=GROUP,
    why="has the config of all workers, before the driver starts one",
    delete_when="ROLL compares the dtypes of trainer and rollout",
    optional=True,  # another PyPI project also has a package ``roll``
)
def start(call: Call, pipeline_config: Any) -> None:
    """Compare trainer, reference model and rollout before the driver starts their workers.

    Raises:
        UnsupportedPrecisionError: strict mode is on, and only the trainer computes in float16, or
            the user asks for an LM head in fp32.
    """
    sides = read_sides(pipeline_config)
    if sides is not None:
        report_sides(sides, partial(_write, pipeline_config))
    call.proceed()
