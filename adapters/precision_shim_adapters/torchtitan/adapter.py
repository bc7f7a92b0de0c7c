"""The adapter for torchtitan, and the reasons for its choice of seams.

In RL, a controller in another process calls the endpoints of torchtitan's trainer. The RL trainer
computes losses outside ``optim_step``, so the shim scales every loss of an RL trainer whose
``optim_step`` the shim has replaced. In pre-training the shim scales only losses inside
``Trainer.train_step``, since other code builds a ``Trainer`` and runs its own loop.

The seams replace ``optim_step`` and the attention without a wrapt wrapper, because ``optim_step``
is a Monarch object, and dynamo compiles the attention. The shim does not patch the experts' grouped
matrix products, which torchtitan computes in bfloat16 in training and in its generator. For
trainers with their own loop (Flux, TorchFT, Forge, the graph trainer), the shim only warns.

Delete this package when torchtitan scales the loss of float16 training and saves the scaler.
"""

from __future__ import annotations

from precision_shim.adapting import collect

from . import checkpoints, config
from .audit import optimizers, sent_weights
from .rollout import dtypes
from .training import attention, loss_scaling, pretraining, rl

SEAMS = collect(
    config, dtypes, attention, loss_scaling, checkpoints, rl, pretraining, optimizers, sent_weights
)
"""torchtitan's adapter. If several seams have one target, the first seam is the innermost."""
