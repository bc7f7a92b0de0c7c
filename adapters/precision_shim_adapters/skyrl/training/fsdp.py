"""SkyRL on FSDP in fp16: autocast, loss scaling, the scaler's checkpoint and metrics.

``fsdp_config.mixed_precision.param_dtype="fp16"`` makes FSDP compute with fp16 parameters, but
SkyRL's workers run the model under an autocast to bf16, and do not scale the loss.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch

from precision_shim.adapting import Call, decide, seam, warn
from precision_shim.adapting.scaling import Files, SaveAside

from ...torch_fp16 import FEATURE, ScaledTraining
from ...torch_fp16.autocast import autocast_in_fp16
from ..config import FSDP, find_unscaled, mixed_dtypes
from .overflow import add_figures

CLIENT_KEY = "precision_shim_scaler"
"""The key of the scaler's state in a checkpoint's ``client_state``."""

AUTOCAST = ("autocast to fp16", "it follows param_dtype")
"""The decision on SkyRL's autocast, and its reason, if the shim scales the loss."""

_STRATEGY = "skyrl.backends.skyrl_train.distributed.fsdp_strategy:FSDPStrategy"
_WORKERS = "skyrl.backends.skyrl_train.workers.worker"
_FP16: dict[str, Any] = {
    "feature": FEATURE,
    "group": FSDP,
    "delete_when": "SkyRL scales fp16 losses on FSDP",
}
"""Arguments that all seams on the FSDP workers share."""


def scaled_because(subject: str) -> str:
    """The reported reason for scaling a model's loss; ``subject`` is the model's config section."""
    return f"{subject}.fsdp_config.mixed_precision.param_dtype is fp16"


def _is_fp16(strategy: Any) -> bool:
    return mixed_dtypes(strategy.fsdp_config)["param_dtype"] is torch.float16


@seam(
    f"{_STRATEGY}._fsdp_init_model",
    why="every model passes here; the workers' autocast is hard-coded in six places",
    relies_on=("mixed_precision", "param_dtype", "device_mesh", "fsdp_config"),
    **_FP16,
)
def follow_param_dtype(call: Call) -> Any:
    """Make SkyRL autocast to fp16 if FSDP's ``param_dtype`` is fp16.

    Raises:
        DtypeError: a value in ``mixed_precision`` is no dtype name.
    """
    in_fp16 = _is_fp16(call.instance)
    module = call.proceed()
    if in_fp16:
        autocast_in_fp16(module, call.instance.device_mesh.device_type)
    return module


@seam(
    f"{_STRATEGY}._fsdp_init_train_model",
    why="makes the optimizer of policy and critic",
    relies_on=("AdamW", "device_mesh", "fsdp_config"),
    **_FP16,
)
def scale_train_model(call: Call) -> Any:
    """Store a loss scaler on an fp16 model's ``FSDPStrategy``, if there is an optimizer."""
    model, optimizer, scheduler = call.proceed()
    if optimizer is not None and (told := find_unscaled(call.instance.fsdp_config)):
        warn(told)
    if optimizer is not None and _is_fp16(call.instance):
        subject = "policy" if type(model).__name__ == "HFModelWrapper" else "critic"
        device, because = call.instance.device_mesh.device_type, scaled_because(subject)
        training = ScaledTraining.make("skyrl", subject, device=device, because=because)
        training.keep(call.instance).guard(
            call.instance, "optimizer_step", lambda strategy: (optimizer,)
        )
        decide("skyrl", subject, FEATURE, *AUTOCAST)
    return model, optimizer, scheduler


@seam(f"{_STRATEGY}.backward", why="every backward pass of the FSDP workers", **_FP16)
def scale_loss(call: Call, loss: Any) -> Any:
    """Scale the gradients of a backward pass; the loss that SkyRL reports stays unchanged."""
    training = ScaledTraining.of(call.instance)
    if training is not None:
        training.attach(loss)
    return call.proceed()


@seam(
    f"{_STRATEGY}.optimizer_step",
    why="clips, looks whether the norm is finite, and steps",
    relies_on=("max_norm", "isfinite", "zero_grad"),
    **_FP16,
)
def step(call: Call, optimizer: Any) -> Any:
    """Unscale the gradients before SkyRL clips them, and step the optimizer with the scaler.

    SkyRL itself skips a step whose grad norm is not finite. With ``max_grad_norm=0`` SkyRL does not
    compute the grad norm, and the scaler itself skips a step whose gradients overflowed.

    Raises:
        LossScaleError: too many steps in a row were skipped.
    """
    training = ScaledTraining.of(call.instance)
    if training is None:
        return call.proceed()
    with training.one_step(optimizer):
        grad_norm = call.proceed()
    # SkyRL returns None, or a norm that is not finite, for a skipped step.
    return torch.tensor(math.nan) if training.skipped else grad_norm


@seam(
    f"{_STRATEGY}.save_checkpoint",
    why="client_state is stored with the checkpoint, in the last of a rank's files",
    relies_on=("client_state", "extra_state_dict"),
    **_FP16,
)
def save(call: Call, ckpt_dir: Any, optimizer: Any, client_state: Any) -> Any:
    """Put the scaler's state into the ``client_state`` of a checkpoint."""
    training = ScaledTraining.of(call.instance)
    if training is None or optimizer is None:
        return call.proceed()
    from skyrl.backends.skyrl_train.utils.io.io import is_cloud_path

    with SaveAside({} if is_cloud_path(ckpt_dir) else {"": ckpt_dir}) as aside:
        place = aside.places.get("", ckpt_dir)
        record = training.record(_files(call.instance, place), aside.name)
        call.arguments["client_state"] = {**(client_state or {}), CLIENT_KEY: record}
        call.arguments["ckpt_dir"] = place
        return call.proceed()


@seam(
    f"{_STRATEGY}.load_checkpoint",
    why="returns client_state as it was stored",
    relies_on=("client_state", "world_size", "get_rank"),
    **_FP16,
)
def load(call: Call, ckpt_dir: Any, optimizer: Any, load_optimizer_states: Any) -> Any:
    """Restore the scaler from a checkpoint's ``client_state``, which is the same on all ranks.

    Raises:
        ScalerCheckpointError: the scaler's state is damaged on a rank, or differs between ranks.
    """
    path, states = call.proceed()
    strategy = call.instance
    training = ScaledTraining.of(strategy)
    if training is not None and optimizer is not None and load_optimizer_states:
        record = (states.get("client_state") or {}).get(CLIENT_KEY)
        where = os.path.join(str(ckpt_dir), _name(strategy, "extra_state"))
        training.restore_record(record, where, files=_files(strategy, ckpt_dir))
    return path, states


def _name(strategy: Any, what: str) -> str:
    return f"{what}_world_size_{strategy.world_size}_rank_{strategy.get_rank()}.pt"


def _files(strategy: Any, directory: Any) -> Files:
    """The files that SkyRL writes on this rank before the scaler's state.

    SkyRL overwrites files in place, so a job killed during a save leaves old and new files mixed.
    """
    names = (_name(strategy, what) for what in ("model", "optim"))
    return {name: os.path.join(str(directory), name) for name in names}


@seam(
    at=[
        f"{_WORKERS}:PolicyWorkerBase.forward_backward",
        f"{_WORKERS}:CriticWorkerBase.forward_backward",
    ],
    why="returns the metrics that the trainer logs, reduced over the ranks",
    relies_on=("all_reduce_metrics", "strategy"),
    **_FP16,
)
def report(call: Call) -> Any:
    """Add the scaler's metrics to the metrics of a policy's or critic's forward-backward pass."""
    output = call.proceed()
    training = ScaledTraining.of(call.instance.strategy)
    if training is not None:
        scale = float(training.scaler.get_scale())  # of this pass, not of the last step
        add_figures(output, {**training.metrics(), "loss_scale": scale})
    return output
