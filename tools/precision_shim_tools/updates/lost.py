"""Counts of lost updates as data for JSON, and their conversions to shares, metrics and text.

An update of an element is lost if the update was not zero but the stored number did not change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

CODE = "updates-lost"
"""The audit's code for the loss of most updates of a parameter group."""

UNMEASURED = "updates-not-measured"
"""The audit's code for an optimizer whose update rule the meter does not know."""

TOO_MANY = 0.5
"""The meter warns if the share of lost updates of the stored weights is above this value."""

METRICS = {
    "weights": "updates_lost",
    "exp_avg_sq": "updates_lost_exp_avg_sq",
    "rollout": "updates_lost_rollout",
}
"""Maps the place where updates are lost to the name of their share in a framework's metrics."""

_TITLES = {"weights": "stored weights", "exp_avg_sq": "second moment", "rollout": "rollout copies"}
_SHOWN = 8  # maximum number of parameter groups in a table; Megatron makes up to six


def describe(step: int, every: int, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many of an optimizer's updates were lost on this rank, as data for JSON.

    The result has the arguments, and the share of each kind over all groups, or ``None``.

    Args:
        step: number of the step, counted from the attachment of the meter.
        every: number of steps from one measurement to the next.
        groups: for each parameter group with an update other than zero: its number ``group``,
            ``lr``, the numbers of updated ``elements`` and of those ``sampled``, and the
            ``count``s of ``weights``, ``exp_avg_sq`` and ``rollout``.
    """
    figures: dict[str, Any] = {"step": step, "every": every, "groups": groups}
    return {**figures, **{name: share([figures], name) for name in METRICS}}


def count(dtype: str, updates: int, lost: int) -> dict[str, Any] | None:
    """Return the counts of one kind of numbers as data for JSON; ``None`` if there are none.

    ``dtype`` is how the numbers are stored, such as ``"bf16+int16"``. ``updates`` counts the
    elements whose update was not zero (for ``exp_avg_sq``: should make them smaller), and ``lost``
    those of them whose stored value did not change.
    """
    return {"dtype": dtype, "updates": updates, "lost": lost} if dtype else None


def share(figures: Iterable[Mapping[str, Any]], name: str) -> float | None:
    """Return the share ``name`` (see ``METRICS``) over optimizers, weighted by groups' elements."""
    updates = lost = 0.0
    for figure in figures:
        for group in figure["groups"]:
            if group[name] is not None:
                weight = group["elements"] / group["sampled"]
                updates += weight * group[name]["updates"]
                lost += weight * group[name]["lost"]
    return lost / updates if updates else None


def metrics(figures: Sequence[Mapping[str, Any]], prefix: str = "") -> dict[str, float]:
    """Return the measured shares of lost updates, keyed by their names in a framework's metrics."""
    shares = {name: share(figures, name) for name in METRICS}
    return {
        f"{prefix}{METRICS[name]}": share for name, share in shares.items() if share is not None
    }


def lines(updates: Mapping[str, Any]) -> Iterator[str]:
    """Yield an optimizer's figures as lines of text."""
    yield f"updates lost to rounding, step {updates['step']}:"
    groups = updates["groups"]
    for group in groups[:_SHOWN]:
        shares = ", ".join(
            f"{name} {_percent(group[name])} ({group[name]['dtype']})"
            for name in METRICS
            if group[name] is not None and group[name]["updates"]
        )
        unknown = ", rollout not measured" if group["rollout"] is None else ""
        yield f"  group {group['group']}, lr {group['lr']:g}: {shares}{unknown}"
    if len(groups) > _SHOWN:
        yield f"  and {len(groups) - _SHOWN} more groups"


def brief(updates: Mapping[str, Any]) -> str:
    """Return the shares of lost updates over all groups as one line of text."""
    shares = ", ".join(
        f"{title} {updates[name]:.1%}"
        for name, title in _TITLES.items()
        if updates[name] is not None
    )
    return f"updates lost to rounding at step {updates['step']}: {shares}"


def _percent(count: Mapping[str, Any]) -> str:
    return f"{count['lost'] / count['updates']:.1%}"


def findings(
    updates: Mapping[str, Any], part: str, where: str, masters: Collection[str] = ()
) -> Iterator[tuple[int, tuple[str, str | None, str | None, str, str, str]]]:
    """Yield the index of each group that lost most of its updates, with fields for a ``Finding``.

    ``masters`` are the dtypes of the part's masters; ``where`` is framework and version.
    """
    for group in updates.get("groups", ()):
        count = group["weights"]
        if not count["updates"] or count["lost"] <= TOO_MANY * count["updates"]:
            continue
        dtype, percent = count["dtype"], _percent(count)
        stored = set(dtype.split(", "))  # a group may have weights of several dtypes
        message = (
            f"{where}, {part}, parameter group {group['group']} (lr {group['lr']:g}): {percent} of "
            f"the updates of the stored weights ({dtype}) were rounded away at step "
            f"{updates['step']}, expected at most {TOO_MANY:.0%}: {_remedy(stored)}."
        )
        in_masters = all(name in masters or "+" in name for name in stored)
        component = "master" if in_masters else "params"
        yield (
            group["group"],
            (CODE, part, component, f"at most {TOO_MANY:.0%} lost", f"{percent} lost", message),
        )


def _remedy(stored: Collection[str]) -> str:
    sixteen = sorted({"bf16", "fp16"}.intersection(stored))
    if not sixteen:
        return (
            "such updates are below half a bit of a weight of 32 bits, so that no dtype helps. "
            "Raise the learning rate, or look for parameters that get no gradient and are moved by "
            "their weight decay alone"
        )
    which, what = "the weights", "a 16-bit weight"
    if len(sixteen) < len(stored):
        which = f"the {' and '.join(sixteen)} weights"
        what = "a weight, and a part of these weights has 16 bits"
    return (
        f"such updates are below half a bit of {what}. Keep {which} in fp32 (FSDP's mixed "
        "precision computes in 16 bits all the same; Megatron keeps masters where the "
        "OptimizerConfig has bf16 or fp16), use an optimizer with masters, or raise the learning "
        "rate"
    )
