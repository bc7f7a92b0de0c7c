"""How a pair ended, and the closed list of allowed ends.

- *exact*: the resumed training equals a training that was never stopped;
- *refused*: the shim raises an error that names a way to continue;
- *told*: a warning or decision of the shim names the states that differ, and no others differ;
- *as unpatched*: the same jobs with the shim off end in the same way.

All other ends are *wrong*.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..processes.rank_server import Ranks
from .drawing import OFF, Pair

SCALER = frozenset({"scale", "tracker", "counts"})
NOT_COMPARED = frozenset({"lr"})

REFUSALS = {
    "CheckpointLayoutError": r"Set |set |Install |Resume with|save again|its message says why",
    "ScalerCheckpointError": r"Take another|Give every rank|Or delete|Upgrade",
    "UnsupportedPrecisionError": r"Install|Set |set |Leave|Remove|Use |use ",
    "InconsistentPrecisionError": r"Set |set |Leave|Remove",
    "DtypeError": r"allowed|legal|Write|Use ",
    "SettingsError": r"Write|Raise|Correct|lower",
    "LossScaleError": r"look for",
}
"""The shim's errors, and a part of each message that names a way to continue."""

TOLD = (
    (r"no loss scaler state", SCALER),
    (r"fresh scaler", SCALER),
    (r"is kept in \w+ with a scale that is computed anew", {"exp_avg", "exp_avg_sq"}),
    (r"fp32 masters were rounded", {"master"}),
    (r"as set here, and not", {"settings"}),
    (r"growth tracker \d+ and not \d+", {"tracker"}),
)
"""Parts of the shim's warnings and decisions, and the components that may differ after them."""


@dataclass(frozen=True)
class End:
    """How a pair ended.

    Attributes:
        kind: ``exact``, ``refused``, ``told``, ``as unpatched`` or ``wrong``.
        why: the reason.
    """

    kind: str
    why: str = ""


Results = Sequence[Sequence[Mapping[str, Any]]]
"""The results of each job's ranks."""


def run(pair: Pair, launch: Callable[[str], Ranks], folder: Path) -> Results:
    """Run the jobs one after the other, each in its own processes, until one fails."""
    text, found = str(pair), []
    for number in range(len(pair.jobs)):
        ranks = launch(pair.backend)(
            "job", folder=folder, world=pair.ranks, timeout=120, pair=text, number=number
        )
        found.append(ranks)
        if any(one["error"] for one in ranks):
            break
    return found


def end_of(pair: Pair, launch: Callable[[str], Ranks], folder: Path) -> End:
    """Run a pair; returns its end. If there are several ranks, the worst end counts.

    If the checkpoint doctor predicts an exact resume, no other end is allowed.
    """
    found = run(pair, launch, folder / "pair")
    end = _end_of(pair, launch, folder, found)
    predicted = [one.get("predicted") for one in found[-1]]
    # The doctor does not know the resuming job's model.
    known = pair.jobs[-1].dtype == pair.jobs[-2].dtype
    if "exact" in predicted and end.kind != "exact" and known:
        return End("wrong", f"predicted exact, and {end.kind}: {end.why}")
    return end


def _end_of(pair: Pair, launch: Callable[[str], Ranks], folder: Path, found: Results) -> End:
    plain = cache(lambda: run(pair.unpatched(), launch, folder / "unpatched"))
    failed = [one for one in found[-1] if one["error"]]
    if failed:
        return _of_error(pair, failed, len(found), plain)
    ends = [_of_rank(pair, found, rank, folder / "pair", plain) for rank in range(pair.ranks)]
    order = ("wrong", "as unpatched", "told", "exact")
    return min(ends, key=lambda one: order.index(one.kind))


def _of_error(pair: Pair, failed: Sequence[Any], jobs: int, plain: Callable[[], Results]) -> End:
    kind, text, ours = next((one["error"] for one in failed if one["error"][2]), failed[0]["error"])
    what = f"job {jobs}, {failed[0]['phase']}: {kind}: {text[:400]}"
    if ours:
        if kind in REFUSALS and re.search(REFUSALS[kind], text):
            return End("refused", what)
        return End("wrong", f"an error of ours that is not in the list, or says no way on: {what}")
    if pair != pair.unpatched():
        same = plain()
        # If a job cannot save without the shim, the pair cannot resume without it either.
        earlier = len(same) < jobs and pair.jobs[jobs - 1].shim != "on" and _error(same[-1])
        if not earlier and (len(same) != jobs or _error(same[-1]) != kind):
            return End("wrong", f"another end than unpatched ({_error(same[-1])}): {what}")
    if not text and any(one.shim == "on" for one in pair.jobs[:jobs]):
        return End("wrong", f"an error without a word: {what}")
    return End("as unpatched", what)


def _error(ranks: Sequence[Mapping[str, Any]]) -> str:
    return next((one["error"][0] for one in ranks if one["error"]), "")


def _of_rank(
    pair: Pair, found: Results, rank: int, folder: Path, plain: Callable[[], Results]
) -> End:
    last = found[-1][rank]
    saved = [
        json.loads((folder / f"saved-{number}-{rank}.json").read_text())
        for number in range(len(pair.saving))
    ]
    saver = found[-2][rank]
    if not saver["unmoved"]:
        return End("wrong", "the save itself changed the training")
    differs = different(saved[-1], last["state"])
    told = _told(last)
    if differs <= told:
        ahead = _ahead(saver, last, bool(told))
        if not ahead:
            return End("told" if differs or "settings" in told else "exact", ", ".join(differs))
        differs, what = ahead, f"next steps differ: {_first_steps(saver, last)}"
    else:
        what = f"{_values(saved[-1], last['state'], differs)}; told: {sorted(told)}"
    differs -= told
    if _off_at_load(pair, differs):
        same = plain()
        if not _error(same[-1]) and pair != pair.unpatched():
            theirs, resumed = _saved(same, rank), same[-1][rank]["state"]
            also = different(theirs, resumed)
            also |= _ahead(same[-2][rank], same[-1][rank], bool(also))
            if _anew(resumed) and _anew(last["state"]):
                also |= SCALER  # both scalers restarted
            if differs <= also:
                return End("as unpatched", what)
        elif pair == pair.unpatched():
            return End("as unpatched", what)
    return End("wrong", what)


def _anew(state: Mapping[str, Any]) -> bool:
    """Whether a scaler is at verl's initial scale, with a growth tracker of 0."""
    return state["tracker"] == 0 and state["scale"] in (None, 65536.0)


def _saved(results: Results, rank: int) -> Mapping[str, Any]:
    state: Mapping[str, Any] = results[-2][rank]["state"]
    return state


def _off_at_load(pair: Pair, differs: set[str]) -> bool:
    """Whether the features that would keep the differing states are off in the resuming job."""
    job = pair.jobs[-1]
    if job.shim == OFF:
        return True
    if differs <= SCALER | {"steps"}:
        return not job.has("fp16-scaling")
    if pair.backend == "fsdp":  # in verl's FSDP checkpoints the shim adds only the scaler
        return not differs & SCALER or not job.has("fp16-scaling")
    return not job.has("bf16-dispatch")


def different(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    """Components that differ; a component that ``other`` lacks does not count, except the scale.

    A job that starts to scale its loss has a scaler that no job has saved.
    """
    return {
        name
        for name in one
        if name not in NOT_COMPARED
        and one[name] != other.get(name)
        and other.get(name) is not None
        and (one[name] is not None or name == "scale")
    }


def _ahead(saver: Mapping[str, Any], last: Mapping[str, Any], told: bool) -> set[str]:
    """The components that differ in the next steps, although they should be equal."""
    if saver["effective"] != last["effective"] or told:
        # Another optimizer or scaler: only the first loss depends on the saved parameters alone.
        compute = [one["effective"].get("computed") for one in (saver, last)]
        if compute[0] != compute[1]:
            return set()
        mine, theirs = (one["next"][0][:-2] for one in (saver, last))
        return set() if mine == theirs else {"loss"}
    names = set() if saver["next"] == last["next"] else {"steps"}
    return names | different(saver["end"], last["end"])


def _told(last: Mapping[str, Any]) -> set[str]:
    lines = [*last["said"], *last["decisions"]]
    return {
        name
        for pattern, names in TOLD
        for line in lines
        if re.search(pattern, line)
        for name in names
    }


def _values(one: Mapping[str, Any], other: Mapping[str, Any], names: set[str]) -> str:
    return "; ".join(f"{name}: saved {one[name]}, resumed {other[name]}" for name in sorted(names))


def _first_steps(saver: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    pairs = zip(saver["next"], last["next"], strict=True)
    number, (mine, theirs) = next(
        (i, both)
        for i, both in enumerate(pairs)
        if both[0] != both[1] or i == len(last["next"]) - 1
    )
    return f"step {number + 1} after the stop: {mine} and {theirs}"
