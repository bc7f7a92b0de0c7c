"""Data classes for counts of lost updates, and conversions to shares, metrics, JSON and text.

An update of an element is lost if the update was not zero but the stored number did not change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True)
class Count:
    """The number of sampled updates, and the number of lost updates in the sample.

    Attributes:
        dtype: how the updated numbers are stored, such as ``"bf16"`` or ``"bf16+int16"``.
        updates: number of elements whose update was not zero; for ``exp_avg_sq``, number of
            elements that the update should make smaller.
        lost: number of elements in ``updates`` whose stored value did not change.
    """

    dtype: str
    updates: int
    lost: int

    @property
    def share(self) -> float:
        """``lost`` divided by ``updates``."""
        return self.lost / self.updates if self.updates else 0.0


@dataclass(frozen=True)
class Group:
    """One parameter group of an optimizer, on this rank, at one step.

    Attributes:
        group: the group's number in the optimizer.
        lr: learning rate of the step.
        elements: number of elements that the step updated on this rank; frozen parameters and
            parameters without a gradient do not count.
        sampled: number of updated elements in the sample.
        weights: counts for the stored weights: the master weights if there are any, otherwise the
            parameters.
        exp_avg_sq: counts for the second moment; ``None`` without a second moment.
        rollout: counts for the rollout engines' copies of the weights; ``None`` without copies.
    """

    group: int
    lr: float
    elements: int
    sampled: int
    weights: Count
    exp_avg_sq: Count | None = None
    rollout: Count | None = None


@dataclass(frozen=True)
class Figures:
    """How many of an optimizer's updates were lost on this rank, at one step.

    Attributes:
        step: number of the step, counted from the attachment of the meter.
        every: number of steps from one measurement to the next.
        groups: the parameter groups whose updates were not all zero.
        merged: counts for the rollout engine's copies of matrices with merged LoRA, or ``None``.
            For merged LoRA, an update means that the step changed the product of LoRA's factors.
    """

    step: int
    every: int
    groups: tuple[Group, ...]
    merged: Count | None = None

    def share(self, name: str) -> float | None:
        """Return the share of lost updates over all groups, weighted by each group's elements.

        Args:
            name: ``"weights"``, ``"exp_avg_sq"`` or ``"rollout"``.
        """
        return share([self], name)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as dicts, lists, strings and numbers, which JSON can represent."""
        return {
            "step": self.step,
            "every": self.every,
            **{name: self.share(name) for name in METRICS},
            "groups": [asdict(group) for group in self.groups],
            "merged": None if self.merged is None else asdict(self.merged),
        }


def share(figures: Iterable[Figures], name: str) -> float | None:
    """Return the share of lost updates over several optimizers, weighted by each group's elements.

    Args:
        figures: the ``Figures`` of each optimizer.
        name: see ``Figures.share``.
    """
    updates = lost = 0.0
    for figure in figures:
        counts = [(group.elements / group.sampled, getattr(group, name)) for group in figure.groups]
        if name == "rollout":  # if LoRA is merged, the groups have no rollout count
            counts.append((1.0, figure.merged))
        for weight, count in counts:
            if count is not None:
                updates += weight * count.updates
                lost += weight * count.lost
    return lost / updates if updates else None


def metrics(figures: Sequence[Figures], prefix: str = "") -> dict[str, float]:
    """Return the measured shares of lost updates, keyed by their names in a framework's metrics."""
    shares = {name: share(figures, name) for name in METRICS}
    return {
        f"{prefix}{METRICS[name]}": share for name, share in shares.items() if share is not None
    }


def lines(updates: Mapping[str, Any]) -> Iterator[str]:
    """Yield the figures as lines of text, from the result of ``Figures.to_dict``."""
    yield f"updates lost to rounding, step {updates['step']}:"
    groups = updates["groups"]
    for group in groups[:_SHOWN]:
        shares = ", ".join(
            f"{name} {_percent(group[name])} ({group[name]['dtype']})"
            for name in METRICS
            if group[name] is not None and group[name]["updates"]
        )
        yield f"  group {group['group']}, lr {group['lr']:g}: {shares}"
    if len(groups) > _SHOWN:
        yield f"  and {len(groups) - _SHOWN} more groups"
    merged = updates.get("merged")
    if merged is not None and merged["updates"]:
        yield f"  LoRA merged: rollout {_percent(merged)} ({merged['dtype']})"


def brief(figures: Figures) -> str:
    """Return the shares of lost updates over all groups as one line of text."""
    shares = ", ".join(
        f"{title} {part:.1%}"
        for name, title in _TITLES.items()
        if (part := figures.share(name)) is not None
    )
    return f"updates lost to rounding at step {figures.step}: {shares}"


def _percent(count: Mapping[str, Any]) -> str:
    return f"{count['lost'] / count['updates']:.1%}"


def findings(
    updates: Mapping[str, Any], part: str, where: str, masters: Collection[str] = ()
) -> Iterator[tuple[int, tuple[str, str | None, str | None, str, str, str]]]:
    """Yield the index of each group that lost most of its updates, with fields for a ``Finding``.

    Args:
        updates: the result of ``Figures.to_dict``.
        part: the name of the part (optimizer) that the figures belong to.
        where: framework and version, for messages.
        masters: dtypes of the part's masters.
    """
    for group in updates["groups"]:
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


_SIXTEEN = (
    "Keep {which} in fp32 (FSDP's mixed precision computes in 16 bits all the same; Megatron keeps "
    "masters where the OptimizerConfig has bf16 or fp16), use an optimizer with masters, or raise "
    "the learning rate"
)


def _remedy(stored: Collection[str]) -> str:
    sixteen = {"bf16", "fp16"}.intersection(stored)
    if len(sixteen) == len(stored):
        return f"such updates are below half a bit of a 16-bit weight. {_SIXTEEN}".format(
            which="the weights"
        )
    if sixteen:
        return (
            "such updates are below half a bit of a weight, and a part of these weights has 16 "
            f"bits. {_SIXTEEN}".format(which=f"the {' and '.join(sorted(sixteen))} weights")
        )
    return (
        "such updates are below half a bit of a weight of 32 bits, so that no dtype helps. Raise "
        "the learning rate, or look for parameters that get no gradient and are moved by their "
        "weight decay alone"
    )
