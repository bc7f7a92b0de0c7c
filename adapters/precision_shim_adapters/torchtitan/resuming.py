"""What a resume makes of torchtitan's checkpoints."""

from __future__ import annotations

from precision_shim.checkpoints.foretelling import Here
from precision_shim.checkpoints.layout import Outcome, Part

from ..fp16 import resuming as torchs
from .places import PRETRAINING, RL

_POLICYS = "train_state.policy_version"
"""What ``PolicyTrainer.state_dict`` has, and ``Trainer.state_dict`` has not."""


def dcp(part: Part, here: Here) -> Outcome:
    """By torch's distributed checkpoint; the RL trainer's state is a policy's version."""
    rl = any(_POLICYS in unit.tensors or _POLICYS in unit.objects for unit in part.units)
    return torchs.foretell("torchtitan", part, here, RL if rl else PRETRAINING)
