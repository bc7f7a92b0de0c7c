"""Predict how a job would resume the states and loss scaler of a torch optimizer's checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator

from precision_shim.precision.continuing import rounded
from precision_shim.precision.dtypes import name_of, parse_dtype
from precision_shim.process.registry import checkpoints
from precision_shim.scaling.record import choose_values
from precision_shim_adapters.torch_fp16.settings import FEATURE, settings_for

from .layout import FLOATS, CheckpointPart, Outcome, halves
from .prediction import Here
from .tensors import Tensor

_READ = ("params_dtype", "precision")
"""The fields for ``--config`` of a job without a Megatron config."""


def predict_resume(framework: str, part: CheckpointPart, here: Here, group: str) -> Outcome:
    """Predict how a job would resume a checkpoint; ``group`` has the seams that load the scaler."""
    unread = {*(here.config or {})} - {*_READ, *checkpoints()[framework].fields}
    if unread:
        why = f"a job on FSDP or DTensor does not read {', '.join(sorted(unread))}"
        return Outcome("not known", f"{why}; --config takes {' and '.join(_READ)} for it")
    half = halves(part)
    if half is not None:
        return half
    lacking = [name for unit in part.units for name in unit.lacking]
    if lacking:
        return Outcome(
            "fails",
            f"its {' and '.join(lacking)} files are missing, which {framework} loads unless the "
            "job's config leaves them out",
        )
    other = states_of_others(framework, part)
    if other is not None:
        return other
    held = [dtype for name in part.dtypes("params") if (dtype := parse_dtype(name)) is not None]
    saved = "+".join(map(name_of, held))
    params = parse_dtype(str((here.config or {}).get("params_dtype", "")))
    if params is not None:
        pairs = (("weights", name_of(one), name_of(params)) for one in held)
        for problem in rounded(pairs, framework, part.subject, "").problems:
            return Outcome("misread", problem.message)
    shimmed = here.in_force(framework, FEATURE, group)
    told = "states are read in the dtypes that they were saved in"
    if params is None and held:
        told += f", if the job keeps its parameters in {saved}"
    if part.scaler.state == "none":
        told += "; it has no loss scaler's record, needed in fp16: see --config precision=fp16"
    return predict_scaler(framework, part, here, shimmed) or Outcome("exact", told)


def states_of_others(framework: str, part: CheckpointPart) -> Outcome | None:
    """The outcome if the states do not have their parameters' dtypes, as those of torch's Adam."""
    if part.held.get("master"):
        return Outcome("not known", "its optimizer keeps masters, and is not torch's")
    doubt = None
    for whose, name, stored, params in _owners(part):
        if stored not in FLOATS or params == {stored}:
            continue
        dtypes = "+".join(sorted(params))
        if stored in params:
            why = f"the files do not show which of its {dtypes} parameters have the {stored} {name}"
            doubt = Outcome("not known", why)
        elif part.kind == "shards" or framework == "torchtitan":
            # torch's Optimizer.load_state_dict casts a state to its parameter's dtype.
            why = f"torch would cast its {stored} {name} to the parameters' {dtypes} (as {whose})"
            return Outcome("misread", why)
        else:
            return Outcome("not known", f"its {name} is {stored}, unlike its parameters ({whose})")
    return doubt


_MOMENT = re.compile(r"(?:.*\bstate\.)?(.+)\.(exp_avg|exp_avg_sq)$")


def _owners(part: CheckpointPart) -> Iterator[tuple[str, str, str, set[str]]]:
    """Yield each moment's parameter, name and dtype, and the dtypes that the parameter may have.

    torch names a state by its parameter's name, or by its number among the optimizer's parameters.
    """
    kept = {id(tensor) for tensor in part.held.get("params", ())}
    every = {*part.dtypes("params")}
    weights: dict[str, dict[str, Tensor]] = {}
    moments: dict[str, list[tuple[str, str, Tensor]]] = {}
    for unit in part.units:
        for key, tensor in unit.tensors.items():
            of_rank = key.partition(".")[2].partition(".")
            rank, _, name = of_rank if part.kind == "shards" else ("", "", key)
            if id(tensor) in kept:
                weights.setdefault(rank, {})[name] = tensor
            elif match := _MOMENT.match(name):
                moments.setdefault(rank, []).append((match[1], match[2], tensor))
    for rank, states in moments.items():
        near = weights.get(rank, {})
        if all(whose.isdigit() for whose, *_ in states):
            own = {str(number): tensor for number, tensor in enumerate(near.values())}
            sizes = {number: tensor.elements for number, tensor in own.items()}
            if any(sizes.get(whose) != tensor.elements for whose, _, tensor in states):
                own = {}
        else:  # the model's keys may have a prefix
            longest = sorted(near, key=len, reverse=True)
            words = {name: name.split(".") for name in longest}
            own = {
                ".".join(ends[i:]): near[n] for n, ends in words.items() for i in range(len(ends))
            }
        for whose, name, tensor in states:
            yield whose, name, tensor.dtype, {own[whose].dtype} if whose in own else every


def predict_scaler(
    framework: str, part: CheckpointPart, here: Here, shimmed: bool
) -> Outcome | None:
    """Predict how the loss scaler would resume; ``None`` if exact, or if no scaler is needed."""
    scaler, fresh = part.scaler, ""
    if scaler.state == "none":
        asked = parse_dtype(str((here.config or {}).get("precision", "")))
        if asked is not None and asked is parse_dtype("fp16"):
            fresh = "it has no loss scaler's state: the scale begins anew"
    elif not shimmed:
        fresh = (
            f"{framework} by itself reads no loss scaler's state: the scale begins anew, or the "
            "loss is not scaled"
        )
    elif scaler.state == "damaged":
        return Outcome("refused", f"the loss scaler's record is damaged: {scaler.text}")
    elif scaler.state == "of another save":
        if here.settings.strict:
            return Outcome("refused", scaler.text)
        fresh = f"{scaler.text}: the scale begins anew"
    else:
        settings = settings_for(shim=here.settings)
        _, lines = choose_values(scaler.saved, settings, scaler.where)
        fresh = f"the loss scaler goes on otherwise: {lines[0]}" if lines else ""
    return Outcome("starts anew", fresh) if fresh else None
