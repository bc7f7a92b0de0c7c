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
from ..common import sglang_flags
from ..megatron import GROUP, SCALING

MODEL = "slime.backends.megatron_utils.model"
HERE: dict[str, Any] = {
    "group": GROUP,
    "optional": True,  # another PyPI project also has a package named slime
    "delete_when": "slime prepares its gradients once, and reports skipped steps",
}


def read(args: Any, role: str) -> megatron.RequestedConfig:
    """Read one model's optimizer settings from slime's flags; ``role`` is the model's name."""
    blockers = ("slime's stateless Adam keeps no moments",) if args.use_stateless_adam else ()
    return megatron.requested_by_flags(args, f"{versioned('slime')}, flags", role, blockers)


@seam(f"{MODEL}:train_one_step", SCALING, why="asserts that a step was not skipped", **HERE)
def step(call: Call, optimizer: Any) -> tuple[dict[str, Any], Any]:
    """Treat an overflow as a skipped step, and report loss scale and skipped steps."""
    with megatron.skipping(succeeds=True):
        losses, norm = call.proceed()
    return {**losses, **megatron.metrics(optimizer)}, norm


BUILDING = megatron.building_seams("slime", MODEL, read, **HERE)
SEAMS = megatron.where_present(
    collect(megatron.SEAMS, BUILDING, step, sglang_flags.seams("slime")), module=MODEL
)
