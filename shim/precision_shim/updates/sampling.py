"""Choose the optimizer's elements that the meter measures, the same elements at every step."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from ..auditing.reading import local
from .rules import Taken

MOST_ELEMENTS = 1 << 18
"""Maximum number of measured elements on a rank, over all its optimizers together."""

MOST_TENSORS = 512
"""Maximum number of measured tensors per optimizer; each launches about twenty small kernels."""


def allot(sizes: Sequence[int], budget: int) -> list[int]:
    """Divide a budget among tensors (or groups) as equally as their sizes allow."""
    counts = [0] * len(sizes)
    smallest_first = sorted(range(len(sizes)), key=sizes.__getitem__)
    for place, which in enumerate(smallest_first):
        counts[which] = min(sizes[which], budget // (len(sizes) - place))
        budget -= counts[which]
    return counts


class Sample:
    """A fixed sample of an optimizer's elements on this rank.

    Each group contributes an equal number of elements, or all if it has fewer. A group's elements
    are divided into stretches of equal length, and the sample has a random element of each stretch.
    Random numbers are from a separate generator, so torch's global generator does not change.

    Args:
        groups: the optimizer's parameters, by group.
        budget: maximum number of elements in the sample.
        places: for each group, the indices of the parameters to sample; ``None`` for all.

    Attributes:
        taken: for each group, the ``Taken`` of each sampled parameter, by the parameter's index.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[torch.Tensor]],
        budget: int,
        places: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.budget = budget
        self._shapes = _shapes(groups, places)
        tensors = allot([len(shapes) for shapes in self._shapes], MOST_TENSORS)
        chosen = [
            _some(list(shapes), most) for shapes, most in zip(self._shapes, tensors, strict=True)
        ]
        elements = allot(
            [
                sum(numel(group[place]) for place in places)
                for group, places in zip(groups, chosen, strict=True)
            ],
            budget,
        )
        self.taken = [
            _draw(group, places, count, seed)
            for seed, (group, places, count) in enumerate(
                zip(groups, chosen, elements, strict=True)
            )
        ]

    def fits(
        self,
        groups: Sequence[Sequence[torch.Tensor]],
        budget: int,
        places: Sequence[Sequence[int]] | None = None,
    ) -> bool:
        """Whether the sample was drawn for this budget and for these tensors' sizes and devices."""
        return budget == self.budget and self._shapes == _shapes(groups, places)


def numel(parameter: torch.Tensor) -> int:
    """Return the number of a parameter's elements on this rank."""
    return local(parameter).numel()


def _shapes(
    groups: Sequence[Sequence[torch.Tensor]], places: Sequence[Sequence[int]] | None
) -> list[dict[int, tuple[int, torch.device]]]:
    if places is None:
        places = [range(len(group)) for group in groups]
    return [
        {place: (numel(group[place]), local(group[place]).device) for place in some}
        for group, some in zip(groups, places, strict=True)
    ]


def _some(places: Sequence[int], most: int) -> list[int]:
    return sorted(random.Random(0).sample(places, most)) if len(places) > most else list(places)


def _draw(
    parameters: Sequence[torch.Tensor], places: Sequence[int], count: int, seed: int
) -> dict[int, Taken]:
    sizes = [numel(parameters[place]) for place in places]
    total = sum(sizes)
    if count == total:
        return {p: Taken(None, size) for p, size in zip(places, sizes, strict=True) if size}
    # All tensors are made on the host, regardless of torch.set_default_device.
    generator = torch.Generator("cpu").manual_seed(seed)
    within = torch.rand(count, generator=generator, dtype=torch.float64, device="cpu")
    stretches = torch.arange(count, dtype=torch.float64, device="cpu")
    drawn = ((stretches + within) * (total / count)).long()
    drawn.clamp_(max=total - 1)
    bounds = torch.tensor([0, *sizes], device="cpu").cumsum(0)
    cuts = torch.searchsorted(drawn, bounds).tolist()
    taken = {}
    for number, place in enumerate(places):
        indices = drawn[cuts[number] : cuts[number + 1]] - bounds[number]
        if len(indices):
            # The indices are copied to the device once; the host does not wait for the copy.
            device = local(parameters[place]).device
            taken[place] = Taken(indices.to(device, non_blocking=True), len(indices))
    return taken
