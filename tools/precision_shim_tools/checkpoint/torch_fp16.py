"""Predict how a job would resume the states and loss scaler of a torch optimizer's checkpoint."""

from __future__ import annotations

from precision_shim.precision.dtypes import parse_dtype
from precision_shim.precision.scaler_record import choose_values
from precision_shim_adapters.torch_fp16.settings import FEATURE, settings_for

from .layout import (
    EXACT,
    EXP_AVG,
    EXP_AVG_SQ,
    FAILS,
    FRESH,
    MISREAD,
    PARAMS,
    REFUSED,
    CheckpointPart,
    Outcome,
    halves,
)
from .prediction import Here


def predict_resume(framework: str, part: CheckpointPart, here: Here, group: str) -> Outcome:
    """Predict how a job would resume a checkpoint.

    Args:
        framework: the job's framework.
        part: one model of the checkpoint.
        here: the environment in which the job would resume.
        group: name of the seam group that loads the loss scaler's state.
    """
    half = halves(part)
    if half is not None:
        return half
    lacking = [name for unit in part.units for name in unit.lacking]
    if lacking:
        return Outcome(
            FAILS,
            f"its {' and '.join(lacking)} files are missing, which {framework} loads unless the "
            "job's config leaves them out",
        )
    params = list(part.dtypes(PARAMS))
    for name in (EXP_AVG, EXP_AVG_SQ):
        for stored in part.dtypes(name):
            # torch's Optimizer.load_state_dict casts a state to its parameter's dtype.
            if part.kind == "shards" and len(params) == 1 and stored != params[0]:
                return Outcome(
                    MISREAD, f"torch would cast its {stored} {name} to the parameters' {params[0]}"
                )
    shimmed = here.in_force(framework, FEATURE, group)
    told = "states are read in the dtypes that they were saved in"
    if part.scaler.state == "none":
        told += "; it has no loss scaler's record, which only a job in fp16 needs"
    return predict_scaler(framework, part, here, shimmed) or Outcome(EXACT, told)


def predict_scaler(
    framework: str, part: CheckpointPart, here: Here, shimmed: bool
) -> Outcome | None:
    """Predict how the loss scaler would resume; ``None`` if exact, or if no scaler is needed."""
    scaler = part.scaler
    if scaler.state == "none":
        asked = parse_dtype(str((here.config or {}).get("precision", "")))
        lost = asked is not None and asked is parse_dtype("fp16")
        return (
            Outcome(FRESH, "it has no loss scaler's state: the scale begins anew") if lost else None
        )
    if not shimmed:
        return Outcome(
            FRESH,
            f"{framework} by itself reads no loss scaler's state: the scale begins anew, or the "
            "loss is not scaled",
        )
    if scaler.state == "damaged":
        return Outcome(REFUSED, f"the loss scaler's record is damaged: {scaler.text}")
    if scaler.state == "of another save":
        why = f"the loss scaler's record is of another save: {scaler.text}"
        if here.settings.strict:
            return Outcome(REFUSED, why)
        return Outcome(FRESH, f"{why}: the scale begins anew")
    _, _, lines = choose_values(scaler.saved, settings_for(shim=here.settings), scaler.where)
    return Outcome(FRESH, f"the loss scaler goes on otherwise: {lines[0]}") if lines else None
