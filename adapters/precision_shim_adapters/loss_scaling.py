"""What frameworks with a torch optimizer share in fp16: making and keeping a scaler.

Frameworks on FSDP2 differ in where a scaler is made, used and saved; that is each adapter's. What a
scaler is made from, what its checkpoint file says when something is wrong, and the names of its
metrics are the same everywhere.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

from precision_shim.adapting import current_settings, decide, version_of, warn
from precision_shim.errors import ScalerCheckpointError
from precision_shim.scaling import FILE_NAME, LossScaler, ScalerSettings, load, record_of, restore
from precision_shim.scaling import save as write

FEATURE = "fp16-scaling"

VARIABLES = {
    "init_scale": "loss_scale_init",
    "growth_interval": "growth_interval",
    "growth_factor": "growth_factor",
    "backoff_factor": "backoff_factor",
}
"""The scaler's own names, to the names of the shim's settings."""


def settings_for(
    configured: Mapping[str, Any] | None = None, framework_default: ScalerSettings | None = None
) -> ScalerSettings:
    """Bring together what the user wrote, the variables and the framework's own values.

    Args:
        configured: what the user wrote in the framework's config, by the names of
            ``ScalerSettings``; it wins over variables.
        framework_default: what the framework's own scaler has; ``None`` where the scaler is the
            shim's alone, whose defaults are those of the variables.
    """
    shim = current_settings()
    values: dict[str, Any] = {}
    chosen: set[str] = set()
    for name, variable in VARIABLES.items():
        if configured is not None and configured.get(name) is not None:
            values[name] = configured[name]
            chosen.add(name)
        elif shim.is_set(variable):
            values[name] = shim[variable]
            chosen.add(name)
        elif framework_default is not None:
            values[name] = getattr(framework_default, name)
        else:
            values[name] = shim[variable]
    # A first scale below the usual minimum is the user's: it is then the minimum.
    least = min(ScalerSettings.min_scale, values["init_scale"])
    return ScalerSettings(**values, min_scale=least, chosen=frozenset(chosen))


def make_scaler(
    framework: str,
    subject: str,
    *,
    device: str,
    because: str,
    configured: Mapping[str, Any] | None = None,
    framework_default: ScalerSettings | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> LossScaler:
    """Make a model's loss scaler, and say so.

    Args:
        framework: the framework's name.
        subject: which model.
        device: device type of its gradients.
        because: why it gets one.
        configured: see ``settings_for``.
        framework_default: see ``settings_for``.
        process_group: ranks that skip together; ``None`` for all.
    """
    settings = settings_for(configured, framework_default)
    decide(
        framework,
        subject,
        FEATURE,
        f"loss scaling from {settings.init_scale:g}, growth x{settings.growth_factor:g} after "
        f"{settings.growth_interval} steps, backoff x{settings.backoff_factor:g}",
        because,
    )
    return LossScaler(settings, device=device, process_group=process_group)


@contextmanager
def steps_through(function: Callable[..., Any], optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Lead ``optimizer.step`` through a function while a framework's loop runs.

    Within the function ``optimizer.step`` is the optimizer's own, for a scaler to call. Not for
    longer than a loop: torch's distributed checkpoints step the optimizer on dummy gradients.
    """
    # The LR scheduler has put a counting wrapper into the instance: that one is called, and put
    # back.
    before = vars(optimizer).get("step")
    own = optimizer.step
    inside = False

    @functools.wraps(own)
    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:
            return own(*args, **kwargs)
        inside = True
        try:
            return function(*args, **kwargs)
        finally:
            inside = False

    optimizer.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        if before is None:
            del optimizer.step
        else:
            optimizer.step = before  # type: ignore[method-assign]


def metrics(scaler: Any, prefix: str = "") -> dict[str, float]:
    """The scaler's figures for a framework's metrics: ``loss_scale`` and ``skipped_steps``.

    ``loss_scale`` is the one that the last step was made with; ``skipped_steps`` counts from the
    job's first step, over resumes. Empty where there is no scaler.
    """
    if not isinstance(scaler, GradScaler) or not scaler.is_enabled():
        return {}
    if not isinstance(scaler, LossScaler):
        return {f"{prefix}loss_scale": float(scaler.get_scale())}
    return {
        f"{prefix}loss_scale": scaler.loss_scale,
        f"{prefix}skipped_steps": float(scaler.counter.skipped),
    }


def save_scaler(
    framework: str,
    directory: str | os.PathLike[str],
    scaler: GradScaler | None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a scaler's state beside a checkpoint that the framework has written.

    A framework's checkpoint that is complete is not lost for this file's sake: what cannot be
    written is a warning (in strict mode an error), and the resume will say it again.
    """
    if scaler is None or not scaler.is_enabled():
        return
    try:
        write(directory, scaler, group)
    except ScalerCheckpointError as error:
        _tell(framework, error)


def restore_scaler(
    framework: str,
    directory: str | os.PathLike[str],
    scaler: GradScaler | None,
    subject: str,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Bring a scaler to the state that a checkpoint's directory holds.

    Raises:
        ScalerCheckpointError: the file is damaged; on every rank.
    """
    if scaler is None or not scaler.is_enabled():
        return
    where = os.path.join(os.fspath(directory), FILE_NAME)
    _restored(framework, where, scaler, subject, lambda: load(directory, scaler, group))


def scaler_record(scaler: GradScaler | None) -> dict[str, Any] | None:
    """The scaler's state for a framework's own file, or ``None`` where there is none."""
    return record_of(scaler) if scaler is not None and scaler.is_enabled() else None


def restore_record(
    framework: str,
    record: object,
    where: str,
    scaler: GradScaler | None,
    subject: str,
) -> None:
    """Bring a scaler to a record that came in a framework's own file; ``None``: it has none.

    Raises:
        ScalerCheckpointError: the record is damaged.
    """
    if scaler is None or not scaler.is_enabled():
        return
    _restored(
        framework,
        where,
        scaler,
        subject,
        lambda: None if record is None else restore(scaler, record, where),
    )


def _restored(
    framework: str,
    where: str,
    scaler: GradScaler,
    subject: str,
    bring: Callable[[], tuple[str, ...] | None],
) -> None:
    lines = bring()
    if lines is None:
        if isinstance(scaler, LossScaler):  # it may have trained before it was asked to load
            scaler.reset()
        warn(
            f"{_versioned(framework)}: no loss scaler state at {where}: the checkpoint was written "
            "without the shim, or by an older one. Training continues with a fresh scaler at "
            f"{scaler.get_scale():g}, so that the first steps may differ from a run that was not "
            "stopped."
        )
        return
    decide(
        framework,
        subject,
        FEATURE,
        f"loss scale {scaler.get_scale():g} restored",
        "; ".join((f"from {where}", *lines)),
    )


def _tell(framework: str, error: ScalerCheckpointError) -> None:
    if current_settings().strict:
        raise error
    warn(f"{_versioned(framework)}: {error}")


def _versioned(framework: str) -> str:
    return f"{framework} {version_of(framework, (framework.replace('-', '_'),))}"
