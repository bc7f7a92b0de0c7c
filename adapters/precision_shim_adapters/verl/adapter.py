"""The adapter for verl, and the reasons for its choice of seams.

One function of verl sets the gradient bucket's dtype, and a later one makes the optimizer's config,
which it must fit. The shim therefore wraps ``MegatronEngine.initialize``, or a legacy worker's
build method, which does both. ``init_megatron_optim_config`` still runs; in
``override_optimizer_config`` the user's values override the shim's. Only the states of Megatron's
optimizers are changed, deliberately: torch's AdamW has states in the parameters' dtype.

Delete this package when verl's native options cover overrides, dtype names and every engine.
"""

from __future__ import annotations

from precision_shim.adapting import collect

from .. import megatron as backend
from ..megatron.training import offload
from .audit import optimizers, sent_weights
from .checkpoints import masters, scaler
from .rollout import driver, lm_head, weight_sync
from .training import (
    automodel,
    engines,
    fsdp,
    fsdp_loops,
    megatron,
    metrics,
    overflow,
    torchtitan,
    veomni,
)

SEAMS = collect(
    backend.SEAMS,
    megatron,
    overflow,
    megatron.NATIVE,
    metrics,
    offload.seams(
        "verl.utils.megatron_utils",
        ("verl.workers.engine.megatron.transformer_impl", megatron.LEGACY),
        why="before 0.9 verl leaves FusedAdam's masters on the GPU",
        delete_when="verl >= 0.9 is the oldest in use",
    ),
    fsdp,
    fsdp_loops,
    scaler,
    veomni,
    automodel,
    torchtitan,
    engines,
    engines.NATIVE,
    masters,
    driver,
    lm_head,
    weight_sync,
    optimizers,
    sent_weights,
)
"""verl's adapter. If several seams have one target, the first seam is the innermost."""
