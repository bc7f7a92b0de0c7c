"""Wrappers for a framework's loss function, norm of the gradients and optimizer's step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import wrapt
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

_NORMS = (torch.linalg.vector_norm, torch.linalg.norm, torch.norm, torch.Tensor.norm)


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


class NormsInFp32(TorchFunctionMode):
    """A context in which torch computes the norm of fp16 tensors in fp32.

    torch returns it in fp16, and FSDP2 also sums the squares of the ranks' norms in fp16: a norm
    from 256 on can become inf, with which clipping sets finite gradients to zero.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, with fp32 as the dtype of the norms that it computes."""
        given, dtype = kwargs or {}, {"dtype": torch.float32}
        if function is torch._foreach_norm and args[0][0].dtype is torch.float16:
            # DTensor's ``_foreach_norm`` takes no dtype in torch 2.15
            return [torch.linalg.vector_norm(one, *args[1:], **dtype) for one in args[0]]
        if function in _NORMS and args[0].dtype is torch.float16:
            given = {**dtype, **given}
        elif function is torch.Tensor.to and args[0].dtype is torch.float32 and not args[0].ndim:
            # FSDP1 rounds the norm, and the factor that clips, to the gradients' dtype
            args = tuple(torch.float32 if one is torch.float16 else one for one in args)
        return function(*args, **given)


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


def gradients_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """The gradients of an optimizer's parameters."""
    parameters = (one for group in optimizer.param_groups for one in group["params"])
    return [one.grad for one in parameters if one.grad is not None]


def moves_nothing(optimizer: Optimizer) -> bool:
    """Whether a step finds no gradient, or only zeros, as when torch steps for a checkpoint."""
    if any(group.get("lr") for group in optimizer.param_groups):
        return not gradients_of(optimizer)
    local = (getattr(one, "to_local", one.detach)() for one in gradients_of(optimizer))
    return not any(one.any() for one in local)
