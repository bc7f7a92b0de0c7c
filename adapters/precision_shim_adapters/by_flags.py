"""The command ``checkpoint`` for ROLL, slime and miles."""

from __future__ import annotations

from precision_shim.adapting import versioned
from precision_shim.checkpoints.foretelling import Here
from precision_shim.checkpoints.layout import EXACT, FAILS, FRESH, PARAMS, Outcome, Part

from .megatron.resuming import foretelling as megatrons
from .roll_checkpoints import FSDP2, has_states


def roll(part: Part, here: Here) -> Outcome:
    """Predict how ROLL on Megatron would resume a checkpoint."""
    return _megatron("roll", part, here)


def roll_sharded(part: Part, here: Here) -> Outcome:
    """Predict how ROLL on FSDP2 would resume; its states may be in the subdirectory ``dcp``."""
    if not part.held.get(PARAMS):
        return Outcome(FAILS, "it has no weights")
    places = [place for unit in part.units for place in (unit.path, unit.path / "dcp")]
    if part.scaler.state != "none" and any(map(has_states, places)):
        from .fp16 import FEATURE, resuming  # only this import needs torch

        if here.in_force("roll", FEATURE, FSDP2):
            found = resuming.foretell_scaler("roll", part, here, shimmed=True)
            return found or Outcome(EXACT, "the shim makes the moments that ROLL loads into")
    who = versioned("roll", called="ROLL")
    return Outcome(FRESH, f"{who} leaves moments out: it loads into an optimizer that has none yet")


def slime(part: Part, here: Here) -> Outcome:
    """Predict how slime would resume a job whose config has fields of OptimizerConfig."""
    return _megatron("slime", part, here)


def miles(part: Part, here: Here) -> Outcome:
    """Predict how miles would resume a job whose config has fields of OptimizerConfig."""
    return _megatron("miles", part, here)


def _megatron(framework: str, part: Part, here: Here) -> Outcome:
    subject = part.subject or "actor"
    wishes = megatrons.assume_wishes(part, here, f"{framework}, flags", subject)
    return megatrons.foretell(framework, part, here, wishes)
