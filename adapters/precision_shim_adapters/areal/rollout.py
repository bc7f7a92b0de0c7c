"""The dtypes in which the trainer, the reference model and the rollout of an AReaL job compute."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from precision_shim.adapting import Call, seam, versioned
from precision_shim.adapting.dtypes import ALIASES, name_of, parse_dtype
from precision_shim.adapting.rollouts import AUTO, Engine, Format, formats

from ..agreement.lm_head import of_rollout, unchanged_heads
from ..agreement.model_files import gates_of, resolve_by_model
from ..agreement.names import engine_name, with_rounded, write_key
from ..agreement.report import FEATURE, Sides, report_sides
from ..megatron.policy.formats import read_format

GROUP = "rollout"
_BF16_ADAM = "adam_bf16"
"""AReaL's Megatron engine with this optimizer computes in bf16, whatever ``actor.dtype`` is."""
_SECTIONS = {"SGLangConfig": "sglang", "vLLMConfig": "vllm"}
"""Maps the class of a server's section to the section's key, which is the backend's name."""


def read_sides(config: Any, *, follows: bool = True) -> Sides | None:
    """Read both sides of a job; ``None`` if the job has no trainer with a dtype.

    Replaces the rollout's dtype name by the one that SGLang and vLLM accept. ``follows``: whether
    the rollout's engine is started from ``config``.

    Raises:
        DtypeError: the rollout's dtype is unknown.
    """
    from omegaconf import OmegaConf

    def engine(subject: str, section: str) -> Engine | None:
        key, kind = f"{section}.dtype", str(OmegaConf.select(config, f"{section}.backend"))
        value = OmegaConf.select(config, key)
        dtype, where = parse_dtype(str(value)), f"{section}.{kind.partition(':')[0]}.fp8_config"
        own = _format(OmegaConf.select(config, where), where)
        return None if dtype is None else Engine(subject, name_of(dtype), key, value, format=own)

    trainer = engine("actor", "actor")
    if trainer is None:
        return None
    kind = str(OmegaConf.select(config, "actor.backend")).partition(":")[0]
    if kind == "megatron" and OmegaConf.select(config, "actor.optimizer.type") == _BF16_ADAM:
        because = f"actor.optimizer.type is {_BF16_ADAM}"
        trainer = replace(trainer, computes="bf16", because=because)
    others = []
    if (OmegaConf.select(config, "actor.kl_ctl") or 0) > 0:
        others.append(engine("ref", "ref"))
    others.append(engine("teacher", "teacher.train"))
    backend = str(OmegaConf.select(config, "rollout.backend"))
    engines = [
        name
        for name in _SECTIONS.values()
        if backend.startswith(name) and OmegaConf.select(config, name) is not None
    ]
    others += [_rollout(name, config, follows=follows) for name in engines]
    served = [of_rollout(name, OmegaConf.to_container(config[name]), name) for name in engines]
    heads = unchanged_heads("actor", "AReaL", served)
    found = list(filter(None, others))
    # AReaL's Megatron engine does not read its own key for the router.
    fields = OmegaConf.select(config, f"actor.{kind}") if kind == "archon" else None
    routed = trainer if kind in ("archon", "megatron") else None
    path, place = str(config.actor.path), f"actor.{kind}.{{}}"
    gates = gates_of(routed, found, "".join(engines), path, fields, place=place)
    return Sides("areal", versioned("areal"), trainer, found, heads, gates=gates)


def _rollout(backend: str, config: Any, *, follows: bool) -> Engine:
    key = f"{backend}.dtype"
    value = _coerce(config[backend], key)
    engine = Engine("rollout", ALIASES.get(value, AUTO), key, value, follows=follows)
    engine = resolve_by_model(engine, backend, str(config.actor.path))
    return with_rounded(engine, config[backend], backend, backend)


def _format(fp8: Any, where: str) -> Format | None:
    """What the quantized layers of an engine compute in, by its section at the key ``where``."""
    if ".megatron." in where and fp8 is not None:
        fields = {**fp8, "fp8": fp8.mode, "fp8_recipe": fp8.recipe}
        return read_format(fields, f"{where}.{{}}", {"fp8": "mode", "fp8_recipe": "recipe"})
    if fp8 is None or fp8.mode != "blockwise":  # Archon's only mode besides "disabled"
        return None
    left_out = (*fp8.exclude_modules, *(() if fp8.include_experts else ("experts",)))
    return Format(
        formats.in_e4m3(formats.BLOCKS, formats.ROWS), left_out, f"{where}.mode={fp8.mode}"
    )


def _coerce(section: Any, key: str) -> str:
    """Replace a section's dtype by the name that SGLang and vLLM accept, and return this name."""
    section.dtype = engine_name(section.dtype, key, versioned("areal"), (AUTO,))
    return str(section.dtype)


@seam(
    "areal.api.cli_args:to_structured_cfg",
    FEATURE,
    group=GROUP,
    why="has the whole config, before an engine starts",
    delete_when="AReaL compares the dtypes of trainer and rollout",
    optional=True,
)
def merge(call: Call, config_cls: Any) -> Any:
    """Compare trainer, reference model and rollout, and report whether they agree.

    AReaL's SPMD launchers start the rollout's servers from processes that merge only the servers'
    own section; there the shim only replaces the dtype's name.

    Raises:
        DtypeError: the rollout's dtype is unknown.
        UnsupportedPrecisionError: strict mode is on, and only the trainer computes in float16, or
            the user asks for an LM head in fp32.
    """
    config = call.proceed()
    server = _SECTIONS.get(config_cls.__name__)
    if server is not None:
        _coerce(config, f"{server}.dtype")
        return config
    from areal.utils.environ import is_single_controller

    sides = read_sides(config, follows=is_single_controller())
    if sides is not None:
        report_sides(sides, partial(write_key, config))
    return config
