"""The adapter for SkyRL, and why its seams are where they are.

SkyRL's ``init_megatron_optim_config`` gets neither the model nor its dtype, and SkyRL decides the
bucket's dtype earlier, in ``make_megatron_module``. So the shim announces the model in the function
that calls both (``MegatronPolicyWorkerBase.init_model``), reads the live parameters in Megatron's
own DDP, and makes one plan for both. SkyRL's own function still runs: the shim adds its values to
the kwargs that SkyRL merges over its own values. What the user wrote overrides the shim's values.
While the dataclasses are built, the shim marks in them what the user wrote, and the marks reach the
workers with the config. The inference engines' ``model_dtype`` is marked in the same way; the
driver compares it with the policy's dtype where SkyRL validates the config.

On FSDP the strategy object makes the optimizer, runs the backward pass, clips, steps and saves:
all places that loss scaling needs, for policy and critic alike.

Deliberately not patched: vLLM, and what the JAX backend computes. In an inference server the audit
asks vLLM's engine through its public methods.

Delete when: SkyRL dispatches on the model's dtype, distinguishes written values from defaults, and
scales fp16 losses; see each seam.
"""

from __future__ import annotations

from precision_shim.adapting import Adapter, collect

from .. import megatron as backend
from ..frameworks import SKYRL
from ..megatron.acting import offload
from . import (
    audit,
    config,
    fsdp,
    halves,
    jax_backend,
    megatron,
    overflow,
    processes,
    rollout,
    servers,
    waiting,
    weights,
)

ADAPTER = Adapter.of(
    SKYRL,
    paths={
        **backend.PATHS,
        **offload.PATHS,
        "megatron": "Megatron workers",
        "megatron weight sync": "Megatron workers (weight sync)",
        waiting.GROUP: "Megatron workers (LoRA adapters that share a worker)",
        "fsdp": "FSDP workers",
        jax_backend.GROUP: "JAX backend",
        "metrics": "all workers (metrics)",
        "trainer": "all workers (the trainer's metrics)",
        "tinker": "all workers (Tinker's metrics)",
        "ray": "all workers (their start in Ray)",
        "rollout": "the driver, for the inference engines",
        "rollout tinker": "the driver, for the inference engines (Tinker's server)",
        halves.GROUP: "all workers (audit of the weights to the inference engines)",
        servers.GROUP: "inference servers (audit of what vLLM holds)",
        "rollout weight sync": "the driver, for the inference engines (the delta sync's sender)",
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
        waiting,
        fsdp,
        jax_backend,
        processes,
        weights,
        rollout,
        audit,
        halves,
        servers,
    ),
)
"""SkyRL's adapter; of several seams on one target the first is the innermost."""
