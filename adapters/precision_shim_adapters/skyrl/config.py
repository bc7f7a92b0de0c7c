"""SkyRL's config: distinguish the user's values from the defaults of the dataclasses.

A SkyRL config built from a command line or a YAML does not show which values the user wrote. While
SkyRL builds a config dataclass, the shim therefore records in the instance's ``__dict__`` which
values the user wrote. Workers receive a pickled config, and a pickle keeps each ``__dict__``.

The shim deletes ``grad_reduce_in_fp32`` from an instance if the user did not write it. A read of a
deleted attribute returns the class's default; an assignment sets the attribute again. For
``optimizer_config_kwargs``, to which SkyRL 0.3 and later adds default keys, the shim stores the
user's keys in an attribute that is no dataclass field.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from precision_shim.adapting import Call, in_force, seam, versioned
from precision_shim.errors import DtypeError
from precision_shim.precision.agreement import ENGINE_NAMES

from ..agreement.names import engine_name
from ..agreement.report import FEATURE as AGREEMENT

BUCKET = "grad_reduce_in_fp32"
KWARGS = "optimizer_config_kwargs"
MODEL_DTYPE = "model_dtype"
INFERENCE = "generator.inference_engine"
"""The config section of the inference engines, with the key ``model_dtype``."""

ROLLOUT = "rollout"
"""The group name (see ``Seam``) of the seams on the inference engines' config."""

_WRITTEN = "_precision_shim_written"

_DATACLASSES = "skyrl.train.config.config"
_FEATURES = ("bf16-dispatch", "grad-bucket-alignment")
"""Features that distinguish a key that the user wrote from SkyRL's default."""
_DELETE = "SkyRL's config tells what was written from what was defaulted"

_old_style: ContextVar[bool] = ContextVar("precision_shim_skyrl_old_style", default=False)
"""Whether SkyRL is building the config from a base YAML; set by ``note_old_style``."""

_overriding: ContextVar[bool] = ContextVar("precision_shim_skyrl_overriding", default=False)
"""Whether SkyRL is building the config from overrides; set by ``note_overrides``."""


@seam(
    f"{_DATACLASSES}:MegatronDDPConfig.__init__",
    _FEATURES,
    group="megatron",
    why="a written grad_reduce_in_fp32=True looks like the default",
    delete_when=_DELETE,
)
def leave_default_to_class(call: Call, grad_reduce_in_fp32: Any) -> Any:
    """Delete ``grad_reduce_in_fp32`` from an instance if the caller did not pass this argument."""
    given = BUCKET in call.arguments
    result = call.proceed()
    if not given:
        _leave_to_class(call.instance, BUCKET)
    return result


@seam(
    f"{_DATACLASSES}:InferenceEngineConfig.__init__",
    AGREEMENT,
    group=ROLLOUT,
    why="every config of inference engines passes here",
    delete_when="SkyRL takes all spellings of a dtype",
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
    _FEATURES,
    group="megatron",
    why="a written use_precision_aware_optimizer=False looks like the default",
    delete_when=_DELETE,
)
def note_written_kwargs(call: Call, optimizer_config_kwargs: Any) -> Any:
    """Record which optimizer settings the user wrote in a YAML or in code."""
    # Read the keys before the call, which in SkyRL 0.3 and later adds defaults to the dict.
    written = _keys(call.arguments.get(KWARGS))
    result = call.proceed()
    vars(call.instance)[_WRITTEN] = written
    return result


@seam(
    "skyrl.train.config.legacy:translate_legacy_config",
    _FEATURES,
    group="megatron",
    why="tells that the YAML was gone through; only the old style comes here",
    delete_when="SkyRL >= 0.3 is the oldest in use",
    optional=True,
)
def note_old_style(call: Call) -> Any:
    """Record that SkyRL builds the config from a base YAML."""
    _old_style.set(True)
    return call.proceed()


@seam(
    f"{_DATACLASSES}:SkyRLTrainConfig.from_cli_overrides",
    AGREEMENT,
    group=ROLLOUT,
    why="a wrong name is known here before an engine starts",
    delete_when="SkyRL takes all spellings of a dtype",
    relies_on=("from_cli",),
)
@seam(
    f"{_DATACLASSES}:SkyRLTrainConfig.from_cli_overrides",
    _FEATURES,
    group="megatron",
    why="overrides in the old style are merged over a YAML that spells out the defaults",
    delete_when=_DELETE,
    relies_on=("from_cli",),
)
def note_overrides(call: Call, args: Any) -> Any:
    """Record which settings the user wrote as overrides on a command line.

    SkyRL merges old-style overrides into a YAML that contains every default, so the shim reads the
    user's keys from the overrides. Without a base YAML, the seams on ``__init__`` record the user's
    values, even for a user's own config class.

    Raises:
        DtypeError: the value of ``model_dtype`` is no dtype that an engine computes in.
    """
    old_style, overriding = _old_style.set(False), _overriding.set(True)
    try:
        config = call.proceed()
        if _old_style.get():
            _keep_overrides(config, args)
    finally:
        _old_style.reset(old_style)
        _overriding.reset(overriding)
    if in_force("skyrl", AGREEMENT, ROLLOUT):
        named(config.generator.inference_engine.model_dtype)
    return config


def note_command_line(config: Any, words: list[str]) -> None:
    """Record which values of a config come from a command line, even if the shim is off.

    Args:
        config: the config that ``from_cli_overrides`` made from ``words``.
        words: the overrides.
    """
    for role in ("policy", "ref"):
        megatron = getattr(getattr(config.trainer, role), "megatron_config", None)
        if megatron is not None:
            vars(megatron).setdefault(_WRITTEN, ())
    _keep_overrides(config, words)


def _keep_overrides(config: Any, given: Any) -> None:
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
        if ddp_config is not None and not written:
            _leave_to_class(ddp_config, BUCKET)
        if _WRITTEN in vars(megatron):
            vars(megatron)[_WRITTEN] = _keys(OmegaConf.select(overrides, f"{base}.{KWARGS}"))


def _keys(given: Any) -> tuple[str, ...]:
    """The keys of ``given``; empty for None, which in SkyRL 0.2 may be the string "None"."""
    return tuple(str(key) for key in given) if isinstance(given, Mapping) else ()


def _leave_to_class(config: Any, key: str) -> None:
    default = getattr(type(config), key, None)
    own = vars(config)
    if default is not None and own.get(key) == default:
        del own[key]


def bucket_is_written(ddp_config: Any) -> bool:
    """Whether the user wrote ``grad_reduce_in_fp32``; true if the shim cannot tell."""
    if ddp_config is None:
        return False
    if isinstance(ddp_config, Mapping):
        return BUCKET in ddp_config
    try:
        return BUCKET in vars(ddp_config)
    except TypeError:  # an object without __dict__
        return True


def named(value: Any, section: str = INFERENCE, key: str = MODEL_DTYPE) -> str:
    """The inference engines' name for a dtype that the user wrote.

    Args:
        value: the value that the user wrote.
        section: the config's section.
        key: the key within ``section`` whose value is the dtype.

    Raises:
        DtypeError: the value names no dtype that an engine computes in.
    """
    if isinstance(value, str) and value in ENGINE_NAMES.values():
        return value  # return early, because a call of ``versioned`` takes milliseconds
    return engine_name(value, f"{section}.{key}", versioned("skyrl"))


def written_kwargs(megatron_config: Any) -> frozenset[str] | None:
    """The user's keys of ``optimizer_config_kwargs``; ``None`` if the shim did not record them."""
    written = getattr(megatron_config, "__dict__", {}).get(_WRITTEN)
    return None if written is None else frozenset(written)
