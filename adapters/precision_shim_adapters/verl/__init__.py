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

from precision_shim.adapting import Adapter, collect

from .. import megatron as backend
from ..frameworks import VERL
from ..megatron.acting import offload
from . import (
    audit,
    automodel,
    driver,
    engines,
    fsdp,
    fsdp_checkpoints,
    fsdp_loops,
    halves,
    head,
    megatron,
    metrics,
    overflow,
    sync,
    titan,
    veomni,
    weights,
)

ADAPTER = Adapter.of(
    VERL,
    paths={
        **backend.PATHS,
        **offload.PATHS,
        "megatron": "Megatron engine",
        "native": "Megatron engine",
        "legacy workers": "legacy Megatron workers",
        "fsdp engine": "FSDP engine",
        "legacy fsdp workers": "legacy FSDP workers",
        "metrics": "all engines (metrics)",
        "tinker metrics": "all engines (Tinker's metrics)",
        "legacy metrics": "legacy workers (metrics)",
        driver.GROUP: "driver (both sides)",
        "veomni engine": "VeOmni engine",
        "fsdp_turbo engine": "FSDP Turbo engine",
        "torchtitan engine": "torchtitan engine",
        "automodel engine": "Automodel engine",
        "fsdp weights": "FSDP engine (weights to the rollout)",
        "torchtitan weights": "torchtitan engine (weights to the rollout)",
        "checkpoint engines": "checkpoint engines (weights to the rollout)",
        head.GROUP: "FSDP engine (LM head)",
        f"legacy {head.GROUP}": "legacy FSDP workers (LM head)",
        f"Megatron {head.GROUP}": "Megatron engine (LM head)",
        f"legacy Megatron {head.GROUP}": "legacy Megatron workers (LM head)",
        halves.SENT: "all engines (audit of the weights to the rollout)",
        f"legacy {halves.SENT}": "legacy workers (audit of the weights to the rollout)",
    },
    seams=collect(
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
        fsdp_checkpoints,
        veomni,
        automodel,
        titan,
        engines,
        engines.NATIVE,
        weights,
        driver,
        head,
        sync,
        audit,
        halves,
    ),
)
"""verl's adapter. If several seams have one target, the first seam is the innermost."""
