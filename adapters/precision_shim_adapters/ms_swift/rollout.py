"""The dtypes in which the trainer and the rollout of a Ray job of ms-swift compute.

Without Ray, the rollout takes the trainer's dtype. With Ray, vLLM has a key of its own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from precision_shim.adapting import Call, seam, versioned
from precision_shim.adapting.dtypes import ALIASES, name_of
from precision_shim.adapting.rollouts import AUTO, Engine

from ..agreement.lm_head import of_rollout, unchanged_heads
from ..agreement.model_files import gates_of, resolve_by_model
from ..agreement.names import engine_name, with_rounded, write_key
from ..agreement.report import FEATURE, Sides, report_sides
from ..megatron.policy.formats import read_format

GROUP = "rollout"
_EXTRA = "vllm_engine_kwargs"
"""The section whose keys override vLLM's arguments."""


def _where() -> str:
    return versioned("ms-swift", "swift")


def _engine(group: str, config: dict[str, Any]) -> Engine:
    """Read a group of vLLM engines; its dtype name is replaced by the name that vLLM accepts."""
    section, key, extra = config, f"{group}.dtype", config.get(_EXTRA)
    if isinstance(extra, dict) and "dtype" in extra:
        section, key = extra, f"{group}.{_EXTRA}.dtype"
    value = section.get("dtype")
    if value is not None:
        value = section["dtype"] = engine_name(value, key, _where(), (AUTO,))
    engine = Engine(group, ALIASES.get(str(value), AUTO), key, value)
    engine = resolve_by_model(engine, "vllm", str(config.get("model")))
    return with_rounded(engine, extra if isinstance(extra, dict) else {}, f"{group}.{_EXTRA}")


def _trainer(args: Any) -> Engine | None:
    """Read the trainer from the driver's arguments; ``None`` if they name no dtype."""
    dtype = getattr(args, "torch_dtype", None)
    if dtype is None:
        return None
    # ms-swift also sets fp16 for torch_dtype=float32, unless the user wrote fp16 or bf16.
    computes = "fp16" if args.fp16 else "bf16" if args.bf16 else name_of(dtype)
    called = {"fp8": "fp8_format", "fp4": "fp4_format"}
    return Engine("model", computes, "torch_dtype", format=read_format(vars(args), "{}", called))


@seam(
    "swift.ray.megatron.pipeline:MegatronRayPipeline._create_pools",
    FEATURE,
    group=GROUP,
    why="has the config of all groups, before the driver asks Ray for GPUs",
    delete_when="ms-swift gives the rollout the trainer's dtype",
    relies_on=("group_cfgs", "group_gpus", "_data_info"),
    optional=True,  # another project's package is also named swift
)
def compare(call: Call) -> None:
    """Compare trainer, rollout and teacher, and report whether they agree.

    Raises:
        DtypeError: the dtype of rollout or teacher is unknown.
        UnsupportedPrecisionError: strict mode is on, and only the trainer computes in float16, or
            the user asks for an LM head in fp32.
    """
    pipeline = call.instance
    others = [
        _engine(group, pipeline.group_cfgs[group])
        for group in ("rollout", "teacher")
        if pipeline.group_gpus.get(group, 0) > 0
    ]
    args = pipeline._data_info.get("_driver_args")
    trainer = _trainer(args)
    if others and trainer is not None:
        own = pipeline.group_cfgs.get("rollout") or {}
        served = of_rollout("vllm", own.get(_EXTRA) or {}, f"rollout.{_EXTRA}")
        heads = unchanged_heads("model", "ms-swift", [served])
        gates = gates_of(trainer, others, "vllm", str(own.get("model")), vars(args), place="{}")
        sides = Sides("ms-swift", _where(), trainer, others, heads, gates=gates)
        report_sides(sides, partial(write_key, pipeline.group_cfgs))
    call.proceed()
