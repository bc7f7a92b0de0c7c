"""Record which values of SkyRL's config the user wrote, and which are its dataclasses' defaults.

A boolean that the user did not write becomes the equal number, 1 or 0. Every copy of the config
keeps it (``dataclasses.replace``, ``asdict``, a pickle), and everything that reads it works alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from precision_shim.adapting import Call, holding, in_force, seam
from precision_shim.errors import DtypeError

from ..agreement.report import FEATURE as AGREEMENT
from ..megatron import PRECISION_AWARE
from .config import BUCKET, KWARGS, MODEL_DTYPE, named

ROLLOUT = "rollout"
"""The group name (see ``Seam``) of the seams on the inference engines' config."""

_DATACLASSES = "skyrl.train.config.config"
_KEYS: dict[str, Any] = {
    "feature": ("bf16-dispatch", "grad-bucket-alignment"),
    "group": "megatron",
    "delete_when": "SkyRL's config tells what was written from what was defaulted",
}
"""Arguments of the seams that record the user's keys."""

_NAMES: dict[str, Any] = {
    "feature": AGREEMENT,
    "group": ROLLOUT,
    "delete_when": "SkyRL takes all spellings of a dtype",
}
"""Arguments of the seams that convert the inference engines' dtype names."""

_old_style: ContextVar[bool] = ContextVar("precision_shim_skyrl_old_style", default=False)
"""Whether SkyRL is building the config from a base YAML."""

_overriding: ContextVar[bool] = ContextVar("precision_shim_skyrl_overriding", default=False)
"""Whether SkyRL is building the config from overrides."""


@seam(
    f"{_DATACLASSES}:MegatronDDPConfig.__init__",
    why="a written grad_reduce_in_fp32=True looks like the default",
    **_KEYS,
)
def mark_default_bucket(call: Call, grad_reduce_in_fp32: Any) -> Any:
    """Make ``grad_reduce_in_fp32`` a number if the caller did not pass this argument."""
    given = BUCKET in call.arguments
    result = call.proceed()
    if not given:
        _mark(vars(call.instance), BUCKET)
    return result


@seam(
    f"{_DATACLASSES}:InferenceEngineConfig.__init__",
    why="every config of inference engines passes here",
    **_NAMES,
)
def name_engines_dtype(call: Call, model_dtype: Any) -> Any:
    """Replace the user's ``model_dtype`` by the engine's dtype name.

    Raises:
        DtypeError: the value names no dtype that an engine computes in.
    """
    if MODEL_DTYPE in call.arguments:
        try:
            call.arguments[MODEL_DTYPE] = named(model_dtype)
        except DtypeError:
            # SkyRL 0.2's from_cli_overrides would catch a DtypeError and use the default dtype. If
            # from_cli_overrides is running, note_overrides raises the DtypeError later.
            if not _overriding.get():
                raise
    return call.proceed()


@seam(
    f"{_DATACLASSES}:MegatronConfig.__init__",
    why="a written use_precision_aware_optimizer=False looks like the default",
    **_KEYS,
)
def mark_default_kwargs(call: Call, optimizer_config_kwargs: Any) -> Any:
    """Make ``use_precision_aware_optimizer`` a number if only SkyRL's defaults have it."""
    given = call.arguments.get(KWARGS)  # to which SkyRL 0.3 and later adds defaults
    written = isinstance(given, Mapping) and PRECISION_AWARE in given
    result = call.proceed()
    if not written:
        _mark(getattr(call.instance, KWARGS), PRECISION_AWARE)
    return result


@seam(
    "skyrl.train.config.legacy:translate_legacy_config",
    why="tells that the YAML was gone through; only the old style comes here",
    optional=True,
    **{**_KEYS, "delete_when": "SkyRL >= 0.3 is the oldest in use"},
)
def note_old_style(call: Call) -> Any:
    """Record that SkyRL builds the config from a base YAML."""
    _old_style.set(True)
    return call.proceed()


@seam(
    f"{_DATACLASSES}:SkyRLTrainConfig.from_cli_overrides",
    why="a wrong name is known here before an engine starts",
    relies_on=("from_cli",),
    **_NAMES,
)
@seam(
    f"{_DATACLASSES}:SkyRLTrainConfig.from_cli_overrides",
    why="overrides in the old style are merged over a YAML that spells out the defaults",
    relies_on=("from_cli",),
    **_KEYS,
)
def note_overrides(call: Call, args: Any) -> Any:
    """Record which settings the user wrote as overrides on a command line.

    SkyRL merges old-style overrides into a YAML that contains every default, so the shim reads the
    user's keys from the overrides. Without a base YAML, the seams on ``__init__`` record the user's
    values, even for a user's config class.

    Raises:
        DtypeError: the value of ``model_dtype`` is no dtype that an engine computes in.
    """
    with holding(_old_style, False), holding(_overriding, True):
        config = call.proceed()
        if _old_style.get():
            note_command_line(config, args)
    if in_force("skyrl", AGREEMENT, ROLLOUT):
        named(config.generator.inference_engine.model_dtype)
    return config


def note_command_line(config: Any, given: Any) -> None:
    """Record which values of ``config`` come from the overrides, even if the shim is off."""
    from omegaconf import OmegaConf

    lines = [f"{key}={value}" for key, value in given.items()] if isinstance(given, dict) else given
    overrides = OmegaConf.from_cli(list(lines))
    for role in ("policy", "ref"):
        base = f"trainer.{role}.megatron_config"
        megatron = getattr(getattr(config.trainer, role), "megatron_config", None)
        if megatron is None:
            continue
        ddp_config = getattr(megatron, "ddp_config", None)  # ``ddp_config`` may be null
        written = OmegaConf.select(overrides, f"{base}.ddp_config.{BUCKET}") is not None
        default = getattr(type(ddp_config), BUCKET, None)
        if not written and getattr(ddp_config, BUCKET, None) == default is not None:
            _mark(vars(ddp_config), BUCKET)
        if OmegaConf.select(overrides, f"{base}.{KWARGS}.{PRECISION_AWARE}") is None:
            _mark(getattr(megatron, KWARGS), PRECISION_AWARE)


def _mark(values: Any, name: str) -> None:
    # In SkyRL 0.2 the kwargs may be the string "None".
    if isinstance(values, dict) and isinstance(values.get(name), bool):
        values[name] = int(values[name])
