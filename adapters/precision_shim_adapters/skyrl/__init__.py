"""SkyRL: what stands where.

Why these layers. SkyRL's ``init_megatron_optim_config`` sees neither the model nor its dtype, and
the bucket is decided before it, in ``make_megatron_module``. So the shim notes which model is being
built around both (``MegatronPolicyWorkerBase.init_model``), looks at the live parameters in
Megatron's own DDP, and lets one plan answer for both. SkyRL's own body still runs: values come in
through the kwargs that it merges over its own, beneath what the user wrote there. What the user
wrote is told from the defaults where the dataclasses are built, and travels with them to the
workers.

On FSDP the strategy object makes the optimizer, runs the backward pass, clips, steps and saves:
everything that loss scaling needs, for policy and critic alike.

Deliberately not patched: the inference engines and the jax backend.

Delete when: SkyRL dispatches on the model's dtype, keeps what was written apart from what was
defaulted, and scales fp16 losses; see each seam.
"""

from __future__ import annotations

from precision_shim.adapting import Adapter, collect

from .. import megatron as backend
from ..frameworks import SKYRL
from ..megatron.acting import offload
from . import audit, config, fsdp, megatron, overflow, processes, weights

ADAPTER = Adapter.of(
    SKYRL,
    paths={
        **backend.PATHS,
        **offload.PATHS,
        "megatron": "Megatron workers",
        "megatron weight sync": "Megatron workers (weight sync)",
        "fsdp": "FSDP workers",
        "metrics": "all workers (metrics)",
        "trainer": "all workers (the trainer's metrics)",
        "tinker": "all workers (Tinker's metrics)",
        "ray": "all workers (their start in Ray)",
    },
    seams=collect(
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
        weights,
        audit,
    ),
)
"""SkyRL's seams; of several on one target the first is the innermost."""
