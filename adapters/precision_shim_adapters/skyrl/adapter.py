"""The adapter for SkyRL, and the reasons for its choice of seams.

SkyRL's ``init_megatron_optim_config`` receives neither the model nor its dtype. SkyRL chooses the
bucket's dtype in ``make_megatron_module``, before it calls ``init_megatron_optim_config``. The shim
makes one plan for optimizer and bucket. While ``MegatronPolicyWorkerBase.init_model`` builds model
and optimizer, its seam stores a function that reads SkyRL's config. A seam on Megatron's DDP reads
the live parameters. The shim adds its values to the kwargs that override SkyRL's own values in the
OptimizerConfig. The user's values override the shim's values. While SkyRL builds its config
dataclasses, the shim records which values the user wrote; the workers receive this record with the
config. When SkyRL validates the config, the driver compares the inference engines' ``model_dtype``
with the policy's dtype.

On FSDP the shim patches SkyRL's strategy object for loss scaling. For policy and critic, the
strategy object makes the optimizer, runs the backward pass, clips gradients, steps and saves.


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
