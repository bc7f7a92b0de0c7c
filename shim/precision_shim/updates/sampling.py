"""Which elements of an optimizer are looked at: the same ones at every look."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from ..auditing.reading import local
from .rules import Taken

MOST_ELEMENTS = 1 << 18
"""Elements that are looked at on a rank, over all its optimizers."""

MOST_TENSORS = 512
"""Tensors that are looked at of one optimizer: each costs some twenty small kernels."""


def allot(sizes: Sequence[int], budget: int) -> list[int]:
    """Divide a budget: each gets as much as the others, or all it can use."""
    found = [0] * len(sizes)
    smallest_first = sorted(range(len(sizes)), key=sizes.__getitem__)
    for place, which in enumerate(smallest_first):
        found[which] = min(sizes[which], budget // (len(sizes) - place))
        budget -= found[which]
    return found


class Sample:
    """A fixed sample of an optimizer's elements on this rank.

    Of each group as many as of the others, or all that there are; within a group one element at
    random of each of as many stretches of equal length. The numbers are drawn by a generator of
    their own: torch's stays where it is.

    Args:
        groups: the optimizer's parameters, by group.
        budget: how many elements at most.

    Attributes:
        budget: the same.
        sizes: number of elements of each group on this rank.
        taken: for each group what is taken of its parameters, by their number in it.
    """

    def __init__(self, groups: Sequence[Sequence[torch.Tensor]], budget: int) -> None:
        self.budget = budget
        self.sizes = [sum(map(_numel, one)) for one in groups]
        self._shapes = _shapes(groups)
        tensors = allot([len(one) for one in groups], MOST_TENSORS)
        chosen = [_some(one, most) for one, most in zip(groups, tensors, strict=True)]
        elements = allot(
            [
                sum(_numel(one[place]) for place in places)
                for one, places in zip(groups, chosen, strict=True)
            ],
            budget,
        )
        self.taken = [
            _draw(one, places, count, seed)
            for seed, (one, places, count) in enumerate(zip(groups, chosen, elements, strict=True))
        ]

    def fits(self, groups: Sequence[Sequence[torch.Tensor]], budget: int) -> bool:
        """Whether the parameters are those that it was drawn for, and where they were."""
        return budget == self.budget and self._shapes == _shapes(groups)


def _numel(parameter: torch.Tensor) -> int:
    return local(parameter).numel()


def _shapes(groups: Sequence[Sequence[torch.Tensor]]) -> list[list[tuple[int, torch.device]]]:
    return [[(_numel(p), local(p).device) for p in one] for one in groups]


def _some(parameters: Sequence[torch.Tensor], most: int) -> list[int]:
    places = range(len(parameters))
    return sorted(random.Random(0).sample(places, most)) if len(places) > most else list(places)


def _draw(
    parameters: Sequence[torch.Tensor], places: Sequence[int], count: int, seed: int
) -> dict[int, Taken]:
    sizes = [_numel(parameters[place]) for place in places]
    total = sum(sizes)
    if count == total:
        return {p: Taken(None, size) for p, size in zip(places, sizes, strict=True) if size}
    # On the host, whatever torch.set_default_device says.
    generator = torch.Generator("cpu").manual_seed(seed)
    within = torch.rand(count, generator=generator, dtype=torch.float64, device="cpu")
    stretches = torch.arange(count, dtype=torch.float64, device="cpu")
    drawn = ((stretches + within) * (total / count)).long()
    drawn.clamp_(max=total - 1)
    bounds = torch.tensor([0, *sizes], device="cpu").cumsum(0)
    cuts = torch.searchsorted(drawn, bounds).tolist()
    found = {}
    for number, place in enumerate(places):
        indices = drawn[cuts[number] : cuts[number + 1]] - bounds[number]
        if len(indices):
            # Once, before the first look; the host does not wait for it.
            device = local(parameters[place]).device
            found[place] = Taken(indices.to(device, non_blocking=True), len(indices))
    return found
