"""The adapter for verl, and the reasons for its choice of seams.

In verl 0.7.1's workers and verl 0.8's engines, one function sets the gradient bucket's dtype, and a
later function makes the optimizer's config. The bucket's dtype must fit the optimizer's config. The
shim therefore wraps ``MegatronEngine.initialize``, or a legacy worker's build method, which makes
both the bucket and the optimizer's config. verl's ``init_megatron_optim_config`` still runs. The
shim adds its values to ``override_optimizer_config``; the user's values override the shim's.

The shim deliberately changes the states of Megatron's optimizers only. The states of torch's AdamW
have the parameters' dtype.

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
