"""Train verl's Automodel engine in fp16, with checks, autocast, scaler and checkpoints."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch

from precision_shim.adapting import Call, decide, seam, versioned, warn
from precision_shim.adapting.dtypes import parse_dtype

from ...torch_fp16 import FEATURE
from ..config import AUTOMODEL, is_fp16, of_section
from .engines import on, scale
from .fsdp import tell_unscaled, training_of

_OPTIMIZER = "optim"
"""Directory in Automodel's checkpoint for the optimizer's files and the scaler's file."""


@seam(
    f"{AUTOMODEL}.__init__",
    why="keeps the config, from which it makes FSDP's policy",
    relies_on=("engine_config", "build_distributed_config_from_engine_config"),
    **on(AUTOMODEL),
)
def check(call: Call, engine_config: Any) -> Any:
    """Refuse settings that do not allow float16; replace the default output dtype, bf16, by fp16.

    Raises:
        DtypeError: no mixed-precision policy, parameters in float16, or an output in bfloat16.
    """
    if is_fp16(engine_config.mp_param_dtype):
        of_section(engine_config, "engine_config").check_fp16()
        if engine_config.mp_output_dtype == "bf16":  # verl's default
            call.arguments["engine_config"] = dataclasses.replace(
                engine_config, mp_output_dtype="fp16"
            )
            why = "it follows mp_param_dtype; verl's default, bf16, fails in the autocast"
            decide("verl", "Automodel engine", FEATURE, "mp_output_dtype=fp16", why)
    else:
        tell_unscaled(of_section(engine_config), parse_dtype(str(engine_config.mp_param_dtype)))
    return call.proceed()


@seam(
    f"{AUTOMODEL}.initialize",
    why="makes module and optimizer; the forward pass is under an autocast to bfloat16",
    relies_on=("optimizer", "module", "engine_config"),
    **on(AUTOMODEL),
)
def build(call: Call) -> Any:
    """Switch the engine's autocast to float16, and scale its loss."""
    result = call.proceed()
    engine = call.instance
    if is_fp16(engine.engine_config.mp_param_dtype):
        from verl.utils.device import get_device_name

        from ...torch_fp16.autocast import autocast_in_fp16

        autocast_in_fp16(engine.module, get_device_name())
        scale(engine, AUTOMODEL.because)
    if engine.optimizer is not None:
        tell_rounded_weights(engine)
    return result


def tell_rounded_weights(engine: Any) -> None:
    """Warn if Automodel trains 16-bit weights although ``model_dtype`` is fp32.

    With ``ep_size`` above 1, verl trains the models that Automodel defines, whose method
    ``initialize_weights`` casts to bfloat16, because Automodel's loader passes no other dtype.
    """
    asked = engine.engine_config.model_dtype
    held = {one.dtype for one in engine.module.parameters() if one.requires_grad}
    rounded = held & {torch.bfloat16, torch.float16}
    if parse_dtype(str(asked)) is torch.float32 and rounded:
        (dtype, *_) = rounded
        warn(
            f"{versioned('verl')}: engine_config.model_dtype={asked!r}, but the weights of "
            f"{type(engine.module).__name__} are {dtype}: nemo_automodel rounds its own models, "
            "which verl takes with ep_size above 1, while it loads them. The optimizer steps the "
            "rounded weights, which lose small updates. Train with ep_size=1, or with an optimizer "
            "that has fp32 masters: optimizer_impl=transformer_engine.pytorch.optimizers, "
            "optimizer=FusedAdam, master_weights=True."
        )


@seam(
    f"{AUTOMODEL}.save_checkpoint",
    why="the engine has the scaler, Automodel's checkpointer has not",
    relies_on=("checkpointer", "save_optimizer"),
    **on(AUTOMODEL),
)
def save(call: Call, local_path: Any) -> Any:
    """Save a checkpoint, with the scaler's state beside the optimizer's files."""
    training, optimizer = training_of(call.instance), call.instance.optimizer
    if training is None or not training.drives:
        return call.proceed()
    from ...torch_fp16.states import make_missing_states

    make_missing_states(optimizer)
    place = os.path.join(local_path, _OPTIMIZER)
    with training.saved_aside(place, {"../": local_path}) as aside:
        call.arguments["local_path"] = aside["../"]
        return call.proceed()


@seam(
    f"{AUTOMODEL}.load_checkpoint",
    why="the engine has the scaler, Automodel's checkpointer has not",
    relies_on=("checkpointer", "load_optimizer"),
    **on(AUTOMODEL),
)
def load(call: Call, local_path: Any) -> Any:
    """Load a checkpoint, and restore the scaler from the file beside the optimizer's files."""
    result = call.proceed()
    training = training_of(call.instance)
    if training is not None and training.drives:
        from precision_shim.adapting.scaling import files_of_rank

        place = os.path.join(local_path, _OPTIMIZER)
        training.restore(place, files_of_rank({"": place, "../": local_path}))
    return result
