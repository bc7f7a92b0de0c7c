"""SkyRL's config: what the user wrote, and what a dataclass filled in.

Built from a command line or a YAML, a SkyRL config looks the same whether the user wrote a value or
left it at the default. Here the one is told from the other while the dataclasses are built, and
noted on them in a way that travels with them: workers get their config pickled, and a copy or
``dataclasses.asdict`` must not lose or show anything.

A default of ``grad_reduce_in_fp32`` is left to the class: the instance has no value of its own,
reads the same, and has one as soon as somebody assigns it. The keys of ``optimizer_config_kwargs``
that were written are noted beside them, since from 0.3 the dataclass fills in the others.
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
"""Whether the config that is being built went through a base YAML."""


# -- while the dataclasses are built ---------------------------------------------------------


@seam(
    f"{_DATACLASSES}:MegatronDDPConfig.__init__",
    _FEATURES,
    group="megatron",
    why="a written grad_reduce_in_fp32=True looks like the default",
    delete_when=_DELETE,
)
def leave_default_to_class(call: Call, grad_reduce_in_fp32: Any) -> Any:
    """Keep an instance free of a bucket that was not given, so that the class's default shows."""
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
    """Note which optimizer settings were given, when a config is built of a YAML or in code."""
    # Read the keys before the call: from 0.3 it adds the defaults to the caller's dict.
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
    """Note that the config comes by way of a base YAML."""
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
    """Keep what the overrides say of a config that is built from a command line.

    Overrides in the old style are merged over a YAML that spells out every default; the overrides
    themselves say which of them the user wrote. Without the YAML the marks are right as they are,
    those of a config class's own values among them.
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
    """Note in a config what a command line wrote, where no seam did while it was built.

    Args:
        config: what ``from_cli_overrides`` made of the words.
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
    """The keys of what was given for the kwargs; on 0.2 None may come as the string "None"."""
    return tuple(str(key) for key in given) if isinstance(given, Mapping) else ()


def _leave_to_class(ddp_config: Any) -> None:
    default = getattr(type(ddp_config), BUCKET, None)
    own = vars(ddp_config)
    if default is not None and own.get(BUCKET) == default:
        del own[BUCKET]


# -- where the config is read ----------------------------------------------------------------


def bucket_is_written(ddp_config: Any) -> bool:
    """Whether the user wrote ``grad_reduce_in_fp32``; what cannot be told counts as written."""
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
