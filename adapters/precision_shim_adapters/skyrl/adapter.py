"""The adapter for SkyRL, and the reasons for its choice of seams.

SkyRL's ``init_megatron_optim_config`` receives neither the model nor its dtype, and the bucket's
dtype is chosen earlier, in ``make_megatron_module``. The seam on ``init_model`` therefore stores a
function that reads the config, and a seam on Megatron's DDP reads the live parameters. In the
kwargs for the OptimizerConfig, the user's values override the shim's. On FSDP the shim patches the
strategy object, which makes the optimizer, runs the backward pass, clips, steps and saves.

Delete this package when SkyRL sets optimizer fields by the model's dtype, distinguishes written
values from defaults, and scales fp16 losses.
"""

from __future__ import annotations

from precision_shim.adapting import collect

from .. import megatron as backend
from ..megatron.training import offload
from . import checkpoints, written
from .audit import optimizers, sent_weights
from .rollout import driver, lm_head
from .training import fsdp, megatron, overflow, processes

SEAMS = collect(
    backend.SEAMS,
    megatron,
    written,
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
