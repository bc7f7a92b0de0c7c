"""SkyRL's config: distinguish what the user wrote from the defaults of the dataclasses.

A SkyRL config built from a command line or a YAML looks the same whether the user wrote a value or
left it at the default. So the shim marks what the user wrote while SkyRL builds the dataclasses.
Copies and pickles must keep the marks, since workers get a pickled config, and
``dataclasses.asdict`` must not show them.

For a default of ``grad_reduce_in_fp32`` the shim deletes the instance's attribute: the class's
default then has the same value, and an assignment sets the attribute again. The shim also marks the
keys of ``optimizer_config_kwargs`` that the user wrote, since from 0.3 the dataclass adds the
others.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from precision_shim.adapting import Call, seam

BUCKET = "grad_reduce_in_fp32"
KWARGS = "optimizer_config_kwargs"
_WRITTEN = "_precision_shim_written"

_DATACLASSES = "skyrl.train.config.config"
_FEATURES = ("bf16-dispatch", "grad-bucket-alignment")
"""The features that need to know what the user wrote."""
_DELETE = "SkyRL's config tells what was written from what was defaulted"

_old_style: ContextVar[bool] = ContextVar("precision_shim_skyrl_old_style", default=False)
"""Whether SkyRL is building the config from a base YAML: written by ``note_old_style``."""


# -- while the dataclasses are built ---------------------------------------------------------


@seam(
    f"{_DATACLASSES}:MegatronDDPConfig.__init__",
    _FEATURES,
    group="megatron",
    why="a written grad_reduce_in_fp32=True looks like the default",
    delete_when=_DELETE,
)
def leave_default_to_class(call: Call, grad_reduce_in_fp32: Any) -> Any:
    """Delete ``grad_reduce_in_fp32`` from an instance that did not get it as an argument."""
    given = BUCKET in call.arguments
    result = call.proceed()
    if not given:
        _leave_to_class(call.instance)
    return result


@seam(
    f"{_DATACLASSES}:MegatronConfig.__init__",
    _FEATURES,
    group="megatron",
    why="a written use_precision_aware_optimizer=False looks like the default",
    delete_when=_DELETE,
)
def note_written_kwargs(call: Call, optimizer_config_kwargs: Any) -> Any:
    """Mark which optimizer settings the user gave in a YAML or in code."""
    # Read the keys before the call: from 0.3 SkyRL adds the defaults to the caller's dict.
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
    _FEATURES,
    group="megatron",
    why="overrides in the old style are merged over a YAML that spells out the defaults",
    delete_when=_DELETE,
    relies_on=("from_cli",),
)
def note_overrides(call: Call, args: Any) -> Any:
    """Mark the settings that the user wrote as overrides on a command line.

    SkyRL merges overrides in the old style over a YAML that spells out every default, so the marks
    come from the overrides themselves. Without that YAML the marks from ``__init__`` are right,
    also for a config class with values of its own.
    """
    token = _old_style.set(False)
    try:
        config = call.proceed()
        if _old_style.get():
            _keep_overrides(config, args)
        return config
    finally:
        _old_style.reset(token)


def note_command_line(config: Any, words: list[str]) -> None:
    """Mark in a config what a command line wrote, where no seam ran while SkyRL built the config.

    Args:
        config: the config that ``from_cli_overrides`` made from the words.
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
        if OmegaConf.select(overrides, f"{base}.ddp_config.{BUCKET}") is None:
            _leave_to_class(megatron.ddp_config)
        if _WRITTEN in vars(megatron):
            vars(megatron)[_WRITTEN] = _keys(OmegaConf.select(overrides, f"{base}.{KWARGS}"))


def _keys(given: Any) -> tuple[str, ...]:
    """The keys of the given kwargs; on 0.2 ``given`` may be the string "None" instead of None."""
    return tuple(str(key) for key in given) if isinstance(given, Mapping) else ()


def _leave_to_class(ddp_config: Any) -> None:
    default = getattr(type(ddp_config), BUCKET, None)
    own = vars(ddp_config)
    if default is not None and own.get(BUCKET) == default:
        del own[BUCKET]


# -- where the config is read ----------------------------------------------------------------


def bucket_is_written(ddp_config: Any) -> bool:
    """Whether the user wrote ``grad_reduce_in_fp32``; true where the shim cannot know."""
    if ddp_config is None:
        return False
    if isinstance(ddp_config, Mapping):
        return BUCKET in ddp_config
    try:
        return BUCKET in vars(ddp_config)
    except TypeError:  # an object without __dict__
        return True


def written_kwargs(megatron_config: Any) -> frozenset[str] | None:
    """Keys of ``optimizer_config_kwargs`` that the user wrote, or ``None`` if that is not known."""
    written = getattr(megatron_config, "__dict__", {}).get(_WRITTEN)
    return None if written is None else frozenset(written)
