"""Choose the optimizer's elements that the meter measures."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from precision_shim.auditing.reading import local

MOST_ELEMENTS = 1 << 18
"""Maximum number of measured elements on a rank, over all its optimizers together."""

MOST_TENSORS = 512
"""Maximum number of measured tensors per optimizer; each launches about twenty small kernels."""


class Taken:
    """Samples a parameter, its gradient and its states at the same positions of a shard."""

    def __init__(self, first: int, step: int, size: int) -> None:
        self.first, self.step = first, step
        self.count = len(range(first, size, step))

    def raw(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of the sampled elements of a tensor, in the tensor's dtype."""
        return local(tensor).detach().reshape(-1)[self.first :: self.step].clone()

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sampled elements in fp64, which represents all smaller dtypes exactly."""
        return self.raw(tensor).double()

    def ones(self, like: torch.Tensor) -> torch.Tensor:
        """Return ones in fp64, one per sampled element, on the device of ``like``."""
        return torch.ones(self.count, dtype=torch.float64, device=local(like).device)


Tensors = Sequence[tuple[torch.Tensor, Taken]]
"""Parameters, each with the ``Taken`` that samples it."""


def sample(groups: Sequence[Sequence[torch.Tensor]], most: int) -> list[Tensors]:
    """Sample at most ``most`` evenly spaced elements: from each group as many, or all it has."""
    there = max(1, sum(map(bool, groups)))
    return [
        _spaced(group, max(1, most // there), max(1, MOST_TENSORS // there)) for group in groups
    ]


def _spaced(group: Sequence[torch.Tensor], most: int, tensors: int) -> Tensors:
    chosen = group[:: -(-len(group) // tensors) or 1]
    # The distance is odd: an even one may divide the length of a row, so that all elements would
    # be from one column.
    step = -(-sum(map(numel, chosen)) // most) | 1
    taken, first = [], 0
    for parameter in chosen:
        size = numel(parameter)
        if first < size:
            taken.append((parameter, Taken(first, step, size)))
        first = (first - size) % step
    return taken


def numel(parameter: torch.Tensor) -> int:
    """Return the number of a parameter's elements on this rank."""
    return local(parameter).numel()
