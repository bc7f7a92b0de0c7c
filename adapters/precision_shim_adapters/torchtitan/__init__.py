"""torchtitan: what stands where.

Why these places. torchtitan's trainers are driven by their own loops: an RL trainer by a controller
in another process, which calls its endpoints, pre-training by ``Trainer.train``. Both clip through
one function and step through one container of optimizers. Between the endpoints of the RL trainer
nothing but the trainer itself knows that a step is coming; so its loss is scaled as soon as its
``optim_step`` is ours. ``Trainer`` has one method for a step, and its loss is scaled within that
method alone: others build a ``Trainer`` and run a loop of their own.

Two places hold no wrapper of wrapt's: ``optim_step`` is an object of Monarch's, and attention is
compiled by dynamo.

Deliberately not patched: the experts' grouped products, which torchtitan computes in bfloat16 in
training and in its generator; ``PolicyTrainer.push_model_state_dict``, which sends one state dict
and casts it where the dtypes differ; trainers with a loop of their own (Flux, TorchFT, Forge, the
graph trainer), which are refused by name.

Delete when: torchtitan scales the loss of float16 training and saves the scaler.
"""

from __future__ import annotations

from precision_shim.adapting import Adapter, collect

from ..frameworks import TORCHTITAN
from . import attention, audit, checkpoints, names, pretraining, rl, scaled
from .places import (
    ATTENTION,
    FORGE,
    GENERATOR,
    METRICS,
    NAMES,
    PRETRAINING,
    RL,
    RL_METRICS,
    TORCHFT,
)

ADAPTER = Adapter.of(
    TORCHTITAN,
    paths={
        RL: "RL trainer",
        RL_METRICS: "RL trainer (metrics)",
        PRETRAINING: "pre-training and SFT",
        METRICS: "pre-training and SFT (metrics)",
        ATTENTION: "varlen attention",
        NAMES: "config and command line",
        GENERATOR: "generator's config",
        TORCHFT: "TorchFT's trainer",
        FORGE: "Forge's engine",
    },
    seams=collect(names, attention, scaled, checkpoints, rl, pretraining, audit),
)
"""torchtitan's seams; of several on one target the first is the innermost."""
