"""slime on Megatron-core: set states by slime's flags, train in fp16, count skipped steps.

slime checks for an overflow with ``prepare_grads()`` and then calls ``step()``, which prepares the
gradients again; the backend makes the second ``prepare_grads()`` do nothing. Megatron scales
slime's loss through ``grad_scale_func``.

Delete this file when slime prepares its gradients once, and reports loss scale and skipped steps.
"""

from __future__ import annotations

from typing import Any

from precision_shim.adapting import Call, collect, seam, versioned

from .. import megatron
from ..agreement import sglang_flags
from ..megatron import ALIGNMENT, APPLYING, BUILDING, GROUP, SCALING

MODEL = "slime.backends.megatron_utils.model"
MAKE = "megatron.core.optimizer:get_megatron_optimizer"
USED = f"{MODEL}:get_megatron_optimizer"
HERE: dict[str, Any] = {
    "group": GROUP,
    "optional": True,  # another PyPI project also has a package named slime
    "delete_when": "slime prepares its gradients once, and reports skipped steps",
}


def read(args: Any, role: str) -> megatron.RequestedConfig:
    """Read one model's optimizer settings from slime's flags; ``role`` is the model's name."""
    blockers = ["slime's stateless Adam keeps no moments"] if args.use_stateless_adam else []
    return megatron.requested_by_flags(args, f"{versioned('slime')}, flags", role, blockers)


@seam(f"{MODEL}:setup_model_and_optimizer", BUILDING, why="makes bucket and optimizer", **HERE)
def build(call: Call, args: Any, role: str = "actor") -> Any:
    """Record that a model is being built, with a function that reads its settings."""
    with megatron.building("slime", lambda: read(args, role)):
        return call.proceed()


@seam(megatron.CONFIG_INIT, APPLYING, why="slime makes its config inline", **HERE)
def configure(call: Call) -> Any:
    """Write the OptimizerConfig fields that the shim chose into slime's config."""
    return megatron.fill_inline(call, "slime")


@seam(MAKE, ALIGNMENT, why="gets config and buckets", aliases=(USED,), **HERE)
def check(call: Call, config: Any, model_chunks: Any) -> Any:
    """Compare the config with the live model before the optimizer is made."""
    if megatron.current_build("slime") is not None:
        megatron.check("slime", config, model_chunks)
    return call.proceed()


@seam(f"{MODEL}:train_one_step", SCALING, why="asserts that a step was not skipped", **HERE)
def step(call: Call, optimizer: Any) -> tuple[dict[str, Any], Any]:
    """Treat an overflow as a skipped step, and report loss scale and skipped steps."""
    with megatron.skipping(succeeds=True):
        losses, norm = call.proceed()
    return {**losses, **megatron.metrics(optimizer)}, norm


SEAMS = megatron.where_present(
    collect(megatron.SEAMS, build, configure, check, step, sglang_flags.seams("slime")),
    module=MODEL,
)
