"""Pass ``dtype: float16`` of verl's torchtitan engine to torchtitan as its compute dtype.

verl ignores ``dtype``, and torchtitan's default is bfloat16. When verl builds a ``Trainer``, the
shim's torchtitan adapter makes the ``ScaledTraining``; torchtitan's checkpoints keep the scaler.
"""

from __future__ import annotations

from typing import Any

from precision_shim.adapting import Call, holding, in_force, seam, versioned, warn
from precision_shim.errors import UnsupportedPrecisionError

from ...frameworks import TITAN_PRETRAINING, TORCHTITAN
from ...torch_fp16 import FEATURE
from ..config import TITAN, is_fp16
from .engines import IN_FP16, on
from .fsdp import optimizers_of


@seam(
    f"{TITAN}.__init__",
    why="knows the engine's config, and builds torchtitan's Trainer with model and optimizer",
    relies_on=("Trainer", "trainer", "model_parts", "engine_config"),
    **on(TITAN),
)
def build(call: Call, engine_config: Any) -> Any:
    """If ``dtype`` is float16, build a trainer that computes in float16, with a scaled loss.

    Raises:
        UnsupportedPrecisionError: the torchtitan adapter, which scales the loss, is not in force.
    """
    if not is_fp16(engine_config.dtype):
        return call.proceed()
    if not in_force(TORCHTITAN.framework, FEATURE, TITAN_PRETRAINING):
        raise UnsupportedPrecisionError(
            f"{versioned('verl')}: engine_config.dtype={engine_config.dtype}: its torchtitan "
            f"engine trains in float16 with the shim's patches of {versioned('torchtitan')}, which "
            "are not in force. Take torchtitan into PRECISION_SHIM_FRAMEWORKS, or train in "
            "bfloat16."
        )
    with holding(IN_FP16, True):
        result = call.proceed()
    from verl.utils.device import get_device_name

    from ...torch_fp16 import ScaledTraining
    from ...torch_fp16.autocast import autocast_in_fp16

    engine = call.instance
    for part in engine.trainer.model_parts:
        autocast_in_fp16(part, get_device_name())
    training = ScaledTraining.of(engine.trainer)
    if training is not None and not engine_config.forward_only:
        training.keep(engine, "scaler").guard(engine, "optimizer_step", optimizers_of, "verl")
    return result


@seam(
    "torchtitan.trainer:Trainer.__init__",
    why="torchtitan reads its compute dtype from this config, in which verl sets none",
    **on(TITAN),
)
def compute_in_fp16(call: Call, config: Any) -> Any:
    """Set float16 in the trainer's config if ``build`` makes the trainer."""
    if IN_FP16.get():
        config.training.mixed_precision_param = "float16"
    return call.proceed()


@seam(
    f"{TITAN}.save_checkpoint",
    why="torchtitan saves only multiples of its interval of 500 steps, and verl says nothing",
    relies_on=("checkpointer",),
    **on(TITAN),
)
def tell_unsaved(call: Call, global_step: Any = 0) -> Any:
    """Warn if torchtitan writes no checkpoint at this step."""
    checkpointer = call.instance.checkpointer
    asked = getattr(checkpointer, "_should_save", None)
    if asked is not None and not asked(global_step):
        interval = getattr(checkpointer, "interval", "?")
        warn(
            f"{versioned('verl')}: save_checkpoint(global_step={global_step}) writes nothing: its "
            f"torchtitan engine saves only steps that are a multiple of {interval}. Set "
            f"trainer.save_freq to a multiple of {interval}."
        )
    return call.proceed()
