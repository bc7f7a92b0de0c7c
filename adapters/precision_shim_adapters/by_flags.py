"""The command ``checkpoint`` for ROLL, slime and miles."""

from __future__ import annotations

from precision_shim.adapting import versioned
from precision_shim.checkpoints.foretelling import Here
from precision_shim.checkpoints.layout import FAILS, FRESH, PARAMS, Outcome, Part

from .megatron.resuming import foretelling as megatrons


def roll(part: Part, here: Here) -> Outcome:
    """Predict how ROLL on Megatron would resume a checkpoint."""
    return _megatron("roll", part, here)


def roll_sharded(part: Part, here: Here) -> Outcome:
    """Predict how ROLL on FSDP2 would resume; the states are in a subdirectory of the weights."""
    who = versioned("roll", called="ROLL")
    why = f"{who} leaves moments out: it loads into an optimizer that has none yet"
    return Outcome(FRESH, why) if part.held.get(PARAMS) else Outcome(FAILS, "it has no weights")


def slime(part: Part, here: Here) -> Outcome:
    """Predict how slime would resume a checkpoint; ``here.config`` has OptimizerConfig fields."""
    return _megatron("slime", part, here)


def miles(part: Part, here: Here) -> Outcome:
    """Predict how miles would resume a checkpoint; ``here.config`` has OptimizerConfig fields."""
    return _megatron("miles", part, here)


def _megatron(framework: str, part: Part, here: Here) -> Outcome:
    subject = part.subject or "actor"
    wishes = megatrons.assume_wishes(part, here, f"{framework}, flags", subject)
    return megatrons.foretell(framework, part, here, wishes)
