"""SkyRL on FSDP in fp16: autocast, loss scaling, its checkpoint and its metrics.

``fsdp_config.mixed_precision.param_dtype="fp16"`` makes FSDP compute with fp16 parameters. SkyRL's
workers then run them under an autocast to bf16, and no scaler keeps small gradients from becoming
zero. Here the autocast follows the parameters, and the strategy that makes the optimizer gets a
scaler with it.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from precision_shim.adapting import Call, decide, seam
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


_STRATEGY = "skyrl.backends.skyrl_train.distributed.fsdp_strategy:FSDPStrategy"
_WORKERS = "skyrl.backends.skyrl_train.workers.worker"
_Wrapper = TypeVar("_Wrapper", bound=Callable[..., Any])


def _seam(target: str, why: str, *relies_on: str) -> Callable[[_Wrapper], _Wrapper]:
    return seam(
        target,
        FEATURE,
        group="fsdp",
        why=why,
        delete_when="SkyRL scales fp16 losses on FSDP",
        relies_on=relies_on,
    )


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


@_seam(
    f"{_STRATEGY}._fsdp_init_model",
    "every model passes here; the workers' autocast is hard-coded in six places",
    "mixed_precision",
    "param_dtype",
    "device_mesh",
)
def autocast_in_fp16(call: Call) -> Any:
    """Let SkyRL's autocast follow the dtype of the parameters that FSDP was given."""
    module = call.proceed()
    if _is_fp16(call.instance):
        module.register_forward_pre_hook(_Autocast(call.instance.device_mesh.device_type))
    return module


# -- the scaler --------------------------------------------------------------------------------


@_seam(f"{_STRATEGY}._fsdp_init_train_model", "makes the optimizer of policy and critic", "AdamW")
def scale_train_model(call: Call) -> Any:
    """Give a strategy whose model is fp16 a scaler with its optimizer.

    The inference-only workers of 0.3 have no optimizer and get none.
    """
    model, optimizer, scheduler = call.proceed()
    if optimizer is not None and _is_fp16(call.instance):
        subject = "policy" if type(model).__name__ == "HFModelWrapper" else "critic"
        scaler = make_scaler(
            "skyrl",
            subject,
            device=call.instance.device_mesh.device_type,
            because=f"{subject}.fsdp_config.mixed_precision.param_dtype is fp16",
        )
        _scalers[call.instance] = scaler, subject
        decide("skyrl", subject, FEATURE, "autocast to fp16", "it follows param_dtype")
    return model, optimizer, scheduler


@_seam(f"{_STRATEGY}.backward", "every backward pass of the FSDP workers")
def scale_loss(call: Call, loss: Any) -> Any:
    """Scale the gradients of a backward pass; the loss that SkyRL reports stays as it is."""
    scaler = scaler_of(call.instance)
    if scaler is not None:
        scaler.attach(loss)
    return call.proceed()


@_seam(
    f"{_STRATEGY}.optimizer_step",
    "clips, looks whether the norm is finite, and steps",
    "max_norm",
    "isfinite",
    "zero_grad",
)
def step(call: Call, optimizer: Any) -> Any:
    """Unscale before SkyRL clips, and step through the scaler.

    SkyRL looks at the norm and takes no step where it is not finite. With ``max_grad_norm`` at 0 it
    does not look: then the scaler skips.

    Raises:
        LossScaleError: too many steps in a row were skipped.
    """
    scaler = scaler_of(call.instance)
    if scaler is None or not _has_gradients(optimizer):
        return call.proceed()
    scaler.unscale_once(optimizer)
    skipped = scaler.counter.skipped
    taken: list[None] = []

    def through(*given: Any, **named: Any) -> Any:
        taken.append(None)
        return scaler.step(optimizer, *given, **named)

    with steps_through(through, optimizer):
        grad_norm = call.proceed()
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


@_seam(
    f"{_STRATEGY}.save_checkpoint",
    "client_state is stored with the checkpoint, without a file of its own",
    "client_state",
    "extra_state_dict",
)
def save(call: Call, optimizer: Any, client_state: Any) -> Any:
    """Put the scaler's state into the ``client_state`` of a checkpoint."""
    scaler = scaler_of(call.instance)
    if scaler is not None and optimizer is not None:
        kept = {**(client_state or {}), CLIENT_KEY: scaler_record(scaler)}
        call.arguments["client_state"] = kept
    return call.proceed()


@_seam(
    f"{_STRATEGY}.load_checkpoint",
    "returns client_state as it was stored",
    "client_state",
)
def load(call: Call, ckpt_dir: Any, optimizer: Any, load_optimizer_states: Any) -> Any:
    """Take the scaler's state out of it again, the same on all ranks.

    Raises:
        ScalerCheckpointError: the state is damaged on a rank, or not the same on all.
    """
    path, states = call.proceed()
    strategy = call.instance
    found = _scalers.get(strategy)
    if found is None or optimizer is None or not load_optimizer_states:
        return path, states
    scaler, subject = found
    record = (states.get("client_state") or {}).get(CLIENT_KEY)
    name = f"extra_state_world_size_{strategy.world_size}_rank_{strategy.get_rank()}.pt"
    where = os.path.join(str(ckpt_dir), name)
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


@_seam(
    f"{_WORKERS}:PolicyWorkerBase.forward_backward",
    "returns the metrics that the trainer logs, reduced over the ranks",
    "all_reduce_metrics",
    "strategy",
)
@_seam(
    f"{_WORKERS}:CriticWorkerBase.forward_backward",
    "returns the metrics that the trainer logs, reduced over the ranks",
    "all_reduce_metrics",
    "strategy",
)
def report(call: Call) -> Any:
    """Put the scaler's figures beside the loss of a policy's or critic's pass."""
    output = call.proceed()
    strategy = call.instance.strategy
    scaler = scaler_of(strategy) if strategy is not None else None
    if scaler is not None:
        # The scale of this very pass; the device has just been waited for, to read the loss.
        add_figures(output, {**metrics(scaler), "loss_scale": float(scaler.get_scale())})
    return output
