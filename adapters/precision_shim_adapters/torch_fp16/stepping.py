"""Wrappers for a framework's loss function and for an optimizer's step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import wrapt
from torch.optim import Optimizer


class ScaledLoss(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """Wraps a loss function so that the backward pass of each loss yields scaled gradients.

    The function returns a loss, or a tuple whose first item is a loss. Each of ``hooks`` is called
    with each loss; the first one scales the loss's gradients.
    """

    def __init__(
        self, loss_function: Callable[..., Any], *hooks: Callable[[torch.Tensor], None]
    ) -> None:
        super().__init__(loss_function)
        self._self_hooks = hooks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the loss function, scale its loss's gradients, and return its result."""
        result = self.__wrapped__(*args, **kwargs)
        for hook in self._self_hooks:
            hook(result if isinstance(result, torch.Tensor) else result[0])
        return result


@contextmanager
def steps_through(function: Callable[..., Any], optimizer: Optimizer) -> Iterator[None]:
    """Replace ``optimizer.step`` by ``function``, which may call it, while a loop runs.

    Outside the loop ``optimizer.step`` must not be replaced, because torch's distributed
    checkpoints call ``optimizer.step`` with dummy gradients.
    """
    # An LR scheduler stores a step-counting wrapper as ``optimizer.step``: call the wrapper, and
    # store it again at the end.
    before = vars(optimizer).get("step")
    own = optimizer.step
    inside = False

    @functools.wraps(own)
    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:
            return own(*args, **kwargs)
        inside = True
        try:
            return function(*args, **kwargs)
        finally:
            inside = False

    optimizer.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        if before is None:
            del optimizer.step
        else:
            optimizer.step = before  # type: ignore[method-assign]


def note_skip(optimizer: Optimizer, inner: Sequence[Optimizer], *args: Any, **kwargs: Any) -> None:
    """For a skipped step, produce the side effects of a step, but change no parameter or moment.

    The LR schedule advances, and torch must not warn that the scheduler stepped before the
    optimizer. If ``optimizer`` is a container of the ``inner`` optimizers, its ``step`` runs,
    because its step hooks may have state that no checkpoint has; the inner steps do nothing.
    """
    for each in (optimizer, *inner):
        each._opt_called = True  # type: ignore[attr-defined]
    if inner:
        with ExitStack() as muted:
            for each in inner:
                muted.enter_context(steps_through(lambda *args, **kwargs: None, each))
            optimizer.step(*args, **kwargs)


def has_gradients(optimizer: Optimizer) -> bool:
    """Whether any parameter has a gradient."""
    return any(
        parameter.grad is not None
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
