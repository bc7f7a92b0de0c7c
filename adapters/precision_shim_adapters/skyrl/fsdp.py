"""SkyRL on FSDP in fp16: autocast, loss scaling, its checkpoint and its metrics.

``fsdp_config.mixed_precision.param_dtype="fp16"`` makes FSDP compute with fp16 parameters. SkyRL's
workers then run them under an autocast to bf16, and no scaler keeps small gradients from becoming
zero. Here the autocast follows the parameters, and the strategy that makes the optimizer gets a
scaler with it.
"""

from __future__ import annotations

import inspect
import math
import os
import weakref
from typing import Any

import torch
import torch.distributed as dist

from precision_shim.adapting import decide
from precision_shim.errors import ScalerCheckpointError
from precision_shim.scaling import LossScaler

from ..loss_scaling import (
    FEATURE,
    make_scaler,
    metrics,
    restore_record,
    scaler_record,
    steps_through,
)
from .overflow import add_figures

CLIENT_KEY = "precision_shim_scaler"
"""Where the scaler's state lies in a checkpoint's ``client_state``."""

_scalers: weakref.WeakKeyDictionary[Any, tuple[LossScaler, str]] = weakref.WeakKeyDictionary()
"""Strategies, to their scaler and whose it is."""


def scaler_of(strategy: Any) -> LossScaler | None:
    """The scaler of an ``FSDPStrategy``, if its model trains in fp16."""
    found = _scalers.get(strategy)
    return found[0] if found is not None else None


def _is_fp16(strategy: Any) -> bool:
    from skyrl.backends.skyrl_train.distributed.fsdp_utils import PrecisionType

    mixed = getattr(strategy.fsdp_config, "mixed_precision", None)
    return mixed is not None and PrecisionType.to_dtype(mixed.param_dtype) is torch.float16


# -- autocast ----------------------------------------------------------------------------------


class _Autocast:
    """A hook that turns the autocast region around a module's forward pass from bf16 to fp16.

    SkyRL computes the loss in the same region, and there torch refuses to put fp16 tensors together
    under an autocast to bf16. So the region is turned, not only the module: the ``with`` block that
    opened it brings back what was before.
    """

    def __init__(self, device: str) -> None:
        self._device = device

    def __call__(self, module: Any, args: Any) -> None:
        if (
            torch.is_autocast_enabled(self._device)
            and torch.get_autocast_dtype(self._device) is torch.bfloat16
        ):
            torch.set_autocast_dtype(self._device, torch.float16)


def autocast_in_fp16(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around ``FSDPStrategy._fsdp_init_model``: SkyRL's autocast follows the parameters' dtype."""
    module = wrapped(*args, **kwargs)
    if _is_fp16(instance):
        module.register_forward_pre_hook(_Autocast(instance.device_mesh.device_type))
    return module


# -- the scaler --------------------------------------------------------------------------------


def scale_train_model(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around ``FSDPStrategy._fsdp_init_train_model``: an optimizer of an fp16 model gets a scaler.

    The inference-only workers of 0.3 have no optimizer and get none.
    """
    model, optimizer, scheduler = wrapped(*args, **kwargs)
    if optimizer is not None and _is_fp16(instance):
        subject = "policy" if type(model).__name__ == "HFModelWrapper" else "critic"
        scaler = make_scaler(
            "skyrl",
            subject,
            device=instance.device_mesh.device_type,
            because=f"{subject}.fsdp_config.mixed_precision.param_dtype is fp16",
        )
        _scalers[instance] = scaler, subject
        decide("skyrl", subject, FEATURE, "autocast to fp16", "it follows param_dtype")
    return model, optimizer, scheduler


def scale_loss(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around ``FSDPStrategy.backward``; the loss that SkyRL reports stays as it is."""
    scaler = scaler_of(instance)
    if scaler is not None:
        scaler.attach(inspect.signature(wrapped).bind(*args, **kwargs).arguments["loss"])
    return wrapped(*args, **kwargs)


def step(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around ``FSDPStrategy.optimizer_step``: unscale before it clips, step through the scaler.

    SkyRL looks at the norm and takes no step where it is not finite. With ``max_grad_norm`` at 0 it
    does not look: then the scaler skips.

    Raises:
        LossScaleError: too many steps in a row were skipped.
    """
    scaler = scaler_of(instance)
    optimizer = inspect.signature(wrapped).bind(*args, **kwargs).arguments["optimizer"]
    if scaler is None or not _has_gradients(optimizer):
        return wrapped(*args, **kwargs)
    scaler.unscale_once(optimizer)
    skipped = scaler.counter.skipped
    taken: list[None] = []

    def through(*given: Any, **named: Any) -> Any:
        taken.append(None)
        return scaler.step(optimizer, *given, **named)

    with steps_through(through, optimizer):
        grad_norm = wrapped(*args, **kwargs)
        if not taken:  # SkyRL skipped; the gradients are gone, the overflow is known
            scaler.step(optimizer)
    scaler.update()
    # SkyRL tells None or, where it skipped itself, what the overflow made of the norm.
    return torch.tensor(math.nan) if scaler.counter.skipped > skipped else grad_norm


def _has_gradients(optimizer: Any) -> bool:
    return any(
        parameter.grad is not None
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


# -- checkpoints -------------------------------------------------------------------------------


def save(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around ``FSDPStrategy.save_checkpoint``: the scaler's state goes into ``client_state``."""
    scaler = scaler_of(instance)
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    if scaler is None or bound.arguments.get("optimizer") is None:
        return wrapped(*args, **kwargs)
    given = bound.arguments.get("client_state") or {}
    bound.arguments["client_state"] = {**given, CLIENT_KEY: scaler_record(scaler)}
    return wrapped(*bound.args, **bound.kwargs)


def load(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around ``FSDPStrategy.load_checkpoint``: and comes back from there, the same on all ranks.

    Raises:
        ScalerCheckpointError: the state is damaged on a rank, or not the same on all.
    """
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    path, states = wrapped(*args, **kwargs)
    found = _scalers.get(instance)
    if found is None or given["optimizer"] is None or not given["load_optimizer_states"]:
        return path, states
    scaler, subject = found
    record = (states.get("client_state") or {}).get(CLIENT_KEY)
    name = f"extra_state_world_size_{instance.world_size}_rank_{instance.get_rank()}.pt"
    where = os.path.join(str(given["ckpt_dir"]), name)
    problem = ""
    try:
        restore_record("skyrl", record, where, scaler, subject)
    except ScalerCheckpointError as error:
        problem = str(error)
    _agree(problem, record, where)
    return path, states


def _agree(problem: str, record: Any, where: str) -> None:
    """Every rank reads a file of its own: they must say the same, or all stop."""
    digest = record.get("digest") if isinstance(record, dict) else None
    mine = problem, digest
    all_of_them = [mine]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        all_of_them = [mine] * dist.get_world_size()
        dist.all_gather_object(all_of_them, mine)
    problems = [text for text, _ in all_of_them if text]
    if problems:
        raise ScalerCheckpointError(problems[0])
    if len({digest for _, digest in all_of_them}) > 1:
        ranks = ", ".join(
            f"{rank}: {digest[:8] if digest else 'none'}"
            for rank, (_, digest) in enumerate(all_of_them)
        )
        raise ScalerCheckpointError(
            f"{where}: the ranks' files hold different loss scaler states (digests by rank: "
            f"{ranks}): they are of different checkpoints. Give every rank the files of one."
        )


# -- metrics -----------------------------------------------------------------------------------


def report(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around ``forward_backward`` of policy and critic: the scaler's figures beside the loss."""
    output = wrapped(*args, **kwargs)
    scaler = scaler_of(instance.strategy) if instance.strategy is not None else None
    if scaler is not None:
        # The scale of this very pass; the device has just been waited for, to read the loss.
        add_figures(output, {**metrics(scaler), "loss_scale": float(scaler.get_scale())})
    return output
