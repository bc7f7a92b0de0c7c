"""The adapter for NeMo-RL, and the reasons for its choice of seams.

NeMo-RL's workers are Ray actors. ``@ray.remote`` copies a worker's methods while its module is
imported, so a later patch does not change the actor: the shim makes a new actor class, of the same
name and options, from a subclass of the worker. To change a function that a worker calls, the shim
patches the module that defines it. If NeMo-RL (0.6 and later) exports the class that ``ray.remote``
decorated, it is patched too, because other workers inherit from it.

``begin_train_step`` and ``finish_train_step`` of the newest commit's Megatron workers are not
patched: their metrics lack ``loss_scale`` and ``skipped_steps``.

Delete this package when NeMo-RL scales the loss of its float16 policies and saves the scaler.
"""

from __future__ import annotations

from precision_shim.adapting import collect

from .. import megatron as backend
from . import rollout
from .audit import optimizers, sent_weights
from .training import dtensor, megatron

SEAMS = collect(dtensor, backend.SEAMS, megatron, rollout, optimizers, sent_weights)
"""NeMo-RL's adapter. If several seams have one target, the first seam is the innermost."""
