"""The commands ``plan`` and ``checkpoint`` for ROLL, slime and miles.

Delete this module when the shim can read the launch lines without running Megatron's argument
parser (slime, miles) or ROLL's pipeline.
"""

from __future__ import annotations

from typing import NoReturn

from precision_shim.adapting import versioned
from precision_shim.checkpoints.foretelling import Here
from precision_shim.checkpoints.layout import EXACT, FAILS, FRESH, PARAMS, Outcome, Part
from precision_shim.errors import PlanError
from precision_shim.planning.command import Job

from .megatron.resuming import foretelling as megatrons
from .roll_checkpoints import FSDP2, has_states

_WHY = {
    "roll": "its YAML is composed by the pipeline that the line starts",
    "slime": "its flags are read by the parser of Megatron's training scripts",
    "miles": "its flags are read by the parser of Megatron's training scripts",
}


def plan_job(job: Job) -> NoReturn:
    """Refuse a ROLL, slime or miles job, because the plan cannot read its launch line.

    Raises:
        PlanError: always.
    """
    raise PlanError(
        f"{versioned(job.framework)}, {job.target}: the plan does not read this launch line: "
        f"{_WHY[job.framework]}. Expected is a line of verl, SkyRL, NeMo-RL, torchtitan, AReaL or "
        "ms-swift. Start the job with PRECISION_SHIM_AUDIT_DIR=DIR, and precision-shim audit DIR "
        "says what it holds."
    )


def roll(part: Part, here: Here) -> Outcome:
    """Predict how ROLL on Megatron would resume a checkpoint."""
    return _megatron("roll", part, here)


def roll_sharded(part: Part, here: Here) -> Outcome:
    """Predict how ROLL on FSDP2 would resume; the states are in a subdirectory of the weights."""
    if not part.held.get(PARAMS):
        return Outcome(FAILS, "it has no weights")
    places = [place for unit in part.units for place in (unit.path, unit.path / "dcp")]
    if part.scaler.state != "none" and any(map(has_states, places)):
        from .fp16 import FEATURE, resuming  # needs torch, as nothing else here

        if here.in_force("roll", FEATURE, FSDP2):
            found = resuming.foretell_scaler("roll", part, here, shimmed=True)
            return found or Outcome(EXACT, "the shim makes the moments that ROLL loads into")
    who = versioned("roll", called="ROLL")
    return Outcome(FRESH, f"{who} leaves moments out: it loads into an optimizer that has none yet")


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
