"""The adapter for SkyRL, and the reasons for its choice of seams.

SkyRL's ``init_megatron_optim_config`` receives neither the model nor its dtype, and SkyRL chooses
the bucket's dtype earlier, in ``make_megatron_module``. While ``init_model`` builds model and
optimizer, its seam therefore stores a function that reads SkyRL's config, and a seam on Megatron's
DDP reads the live parameters. The shim adds its values to the kwargs that override SkyRL's own
values in the OptimizerConfig; the user's values override the shim's.

On FSDP the shim patches SkyRL's strategy object, which makes the optimizer, runs the backward pass,
clips gradients, steps and saves.

Delete this package when SkyRL sets optimizer fields by the model's dtype, distinguishes written
values from defaults, and scales fp16 losses.
"""

from __future__ import annotations

from precision_shim.adapting import collect

from .. import megatron as backend
from ..megatron.training import offload
from . import checkpoints, config
from .audit import optimizers, sent_weights
from .rollout import driver, lm_head
from .training import fsdp, megatron, overflow, processes

SEAMS = collect(
    backend.SEAMS,
    megatron,
    config,
    offload.seams(
        f"{megatron.TRAIN}.distributed.megatron.megatron_utils",
        (f"{megatron.TRAIN}.distributed.megatron.megatron_strategy",),
        why="SkyRL leaves FusedAdam's masters on the GPU",
        delete_when="SkyRL moves master_param",
    ),
    overflow,
    fsdp,
    processes,
    checkpoints,
    driver,
    lm_head,
    optimizers,
    sent_weights,
)
"""SkyRL's adapter. If several seams have one target, the first seam is the innermost."""
