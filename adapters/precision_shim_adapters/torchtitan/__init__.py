"""The adapter for torchtitan, and why its seams are where they are.

Two loops step torchtitan's trainers: for RL a controller in another process that calls the
trainer's endpoints, for pre-training ``Trainer.train``. Both clip with the same function and step
the same container of optimizers. When the RL trainer computes a loss, no running function shows
that a step will follow; so the shim scales every loss of a trainer whose ``optim_step`` is the
shim's. ``Trainer`` has one method for a step, and the shim scales only losses inside that method,
since other code builds a ``Trainer`` and runs its own loop.

Two seams replace the symbol itself and use no wrapt wrapper: ``optim_step`` is a Monarch object,
and dynamo compiles the attention.

Deliberately not patched: the experts' grouped products, which torchtitan computes in bfloat16 in
training and in its generator; ``PolicyTrainer.push_model_state_dict``, which sends one state dict
and casts it where the dtypes differ; trainers with a loop of their own (Flux, TorchFT, Forge, the
graph trainer), of which the shim warns by name.

Delete when: torchtitan scales the loss of float16 training and saves the scaler.
"""

from __future__ import annotations

from precision_shim.adapting import Adapter, collect

from ..frameworks import TORCHTITAN
from . import attention, audit, checkpoints, halves, names, pretraining, rl, scaled, sides
from .places import (
    ATTENTION,
    COMMAND_LINE,
    FORGE,
    HELD,
    METRICS,
    NAMES,
    PRETRAINING,
    RL,
    RL_METRICS,
    ROLLOUT,
    SENT,
    TORCHFT,
)

ADAPTER = Adapter.of(
    TORCHTITAN,
    paths={
        RL: "RL trainer",
        SENT: "RL trainer (audit of the weights to the generators)",
        HELD: "RL generators (audit of what they hold)",
        RL_METRICS: "RL trainer (metrics)",
        PRETRAINING: "pre-training and SFT",
        METRICS: "pre-training and SFT (metrics)",
        ATTENTION: "varlen attention",
        NAMES: "config and command line",
        ROLLOUT: "RL trainer and generator",
        COMMAND_LINE: "command line (what you wrote)",
        TORCHFT: "TorchFT's trainer",
        FORGE: "Forge's engine",
    },
    seams=collect(names, sides, attention, scaled, checkpoints, rl, pretraining, audit, halves),
)
"""torchtitan's adapter; of several seams on one target the first is the innermost."""
