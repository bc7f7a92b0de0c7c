"""NeMo-RL: what stands where.

Why these layers. NeMo-RL's workers are Ray actors: ``@ray.remote`` copies their methods while the
module runs, and ``train`` carries a decorator that makes Ray ship it by value. What is wrapped in
the worker's module afterwards, or on its class, vanishes on the way into the actor. So the actor
class itself is replaced where it is exported, by one of the same name and options that is made
from a subclass; and what a worker calls is wrapped where it is defined.

From 0.6 the class beneath is importable. There its methods are wrapped as well, which reaches
workers that inherit from it under other names (``worker_extension_cls_fqn``, quantized workers).

Deliberately not patched: ``begin_train_step`` and ``finish_train_step`` of NeMo-RL's newest state.
DTensor workers do not have them; a Megatron worker's optimizer skips there as anywhere, but the
figures are not in the metrics.

Delete when: NeMo-RL scales the loss of its float16 policies and saves the scaler.
"""

from __future__ import annotations

from precision_shim.adapting import Adapter, collect

from .. import megatron as backend
from ..frameworks import NEMO_RL
from . import audit, dtensor, megatron

ADAPTER = Adapter.of(
    NEMO_RL,
    paths={
        **backend.PATHS,
        "megatron": "Megatron workers",
        "megatron metrics": "Megatron workers (policy metrics)",
        "megatron value metrics": "Megatron workers (value metrics)",
        "dtensor v1": "DTensor v1",
        "dtensor v1 metrics": "DTensor v1 (metrics)",
        "dtensor v2": "DTensor v2",
        "dtensor v2 metrics": "DTensor v2 (metrics)",
        "dtensor value": "DTensor v2 value workers",
        "dtensor value metrics": "DTensor v2 value workers (metrics)",
    },
    seams=collect(dtensor, backend.SEAMS, megatron, audit),
)
"""NeMo-RL's seams; of several on one target the first is the innermost."""
