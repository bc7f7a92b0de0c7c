"""The loss scaler of fp16 training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor

from ..process.session import check_ranks
from .record import ScalerSettings
from .skips import SkipCounter

MAX_SCALE = 2.0**126
"""Upper bound of the loss scale; the bound's reciprocal is float32's smallest normal number. If all
GRPO rewards are equal, the gradients are zero and never overflow: without a bound the scale would
grow to inf. An infinite scale makes all later gradients NaN (0 x inf)."""


@contextmanager
def _as_others(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Make GradScaler step all optimizers alike, even an optimizer that unscales gradients itself.

    Before the step, the gradients were unscaled (for clipping), and all ranks' overflow flags were
    summed. TransformerEngine's FusedAdam would unscale the gradients a second time
    (``capturable=True``), and would test for an overflow on this rank alone.
    """
    name = "_step_supports_amp_scaling"
    held = vars(optimizer)
    before = {name: held[name]} if name in held else {}
    held[name] = False
    try:
        yield
    finally:
        del held[name]
        held.update(before)


def _shards(optimizer: torch.optim.Optimizer) -> Any:
    """Return the optimizer's parameters, with this rank's shard in place of each DTensor gradient.

    Given DTensors, torch sums the overflow flags over each DTensor's mesh. That sum cannot mix
    DTensors with plain gradients, and for gradients on the CPU the mesh may have no backend that
    can sum (NCCL sums only on GPUs). The scaler itself sums the flags over all ranks afterwards.
    """

    def shard(parameter: torch.Tensor) -> Any:
        grad = parameter.grad
        return SimpleNamespace(grad=grad.to_local()) if isinstance(grad, DTensor) else parameter

    groups = [
        {"params": [shard(parameter) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return SimpleNamespace(param_groups=groups)


class LossScaler(ShardedGradScaler):
    """torch's ``ShardedGradScaler`` with a loss hook, bounds, counters and a limit on skips.

    A framework can use it in place of GradScaler. A job of one process needs no process group. The
    scaler sums overflow flags over the process group, by default over all ranks, so data-, tensor-
    and context-parallel ranks skip the same steps and have the same scale. As with GradScaler, each
    step copies overflow flags and scale from the device in one transfer.

    Attributes:
        scaled: whether a backward pass has added scaled gradients since the last ``unscale_``.

    Args:
        settings: see ``ScalerSettings``.
        device: device type of the gradients, ``"cuda"`` or ``"cpu"``.
        process_group: the ranks that skip the same steps, including all ranks that store a part of
            the same parameter. ``None`` for all ranks.
    """

    def __init__(
        self,
        settings: ScalerSettings | None = None,
        *,
        device: str,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.settings = settings or ScalerSettings()
        self.counter = SkipCounter(self.settings.max_skips)
        self._min_scale = self.settings.min_scale
        self._last_scale: float | None = None
        self._overflow: bool | None = None
        self._check: Callable[[torch.optim.Optimizer], None] | None = None
        self._check_each: Callable[[], None] | None = None
        self._ranks_checked = False
        self.scaled = False
        super().__init__(
            device=device,
            init_scale=self.settings.init_scale,
            growth_factor=self.settings.growth_factor,
            backoff_factor=self.settings.backoff_factor,
            growth_interval=self.settings.growth_interval,
            process_group=process_group,
        )

    def check_first(self, check: Callable[[torch.optim.Optimizer], None]) -> None:
        """Call a function with the optimizer before the first step unscales its gradients."""
        self._check = check

    def check_each(self, check: Callable[[], None]) -> None:
        """Call a function when the backward pass of a loss begins."""
        self._check_each = check

    def _begin_backward(self, gradient: torch.Tensor) -> None:
        if self._check_each is not None:
            self._check_each()
        self.scaled = True

    def scale(self, outputs: Any) -> Any:
        """Multiply outputs by the scale, and note the backward pass of a single tensor."""
        result = super().scale(outputs)
        if self._enabled and isinstance(result, torch.Tensor) and result.requires_grad:
            result.register_hook(self._begin_backward)  # type: ignore[no-untyped-call]
        return result

    @property
    def loss_scale(self) -> float:
        """The last step's scale (before it the initial one; 1 if disabled), without device sync."""
        if not self._enabled:
            return 1.0
        return float(self._init_scale) if self._last_scale is None else self._last_scale

    @property
    def shares_overflows(self) -> bool:
        """Whether ``unscale_`` is a collective operation, which every rank has to call."""
        if not (dist.is_available() and dist.is_initialized()):
            return False
        return dist.get_world_size(self.process_group) > 1

    @property
    def overflow(self) -> torch.Tensor | None:
        """Whether a gradient of any rank is not finite, as a tensor, read without a device sync.

        ``None`` before ``unscale_`` and after ``update``.
        """
        if not self._enabled:
            return None
        flags_found = [
            flag
            for state in self._per_optimizer_states.values()
            for flag in state["found_inf_per_device"].values()
        ]
        if not flags_found:
            return None
        device = flags_found[0].device
        flags = [flag.reshape(()).to(device, non_blocking=True) for flag in flags_found]
        return torch.stack(flags).sum() > 0

    def attach(self, loss: torch.Tensor) -> None:
        """Scale the gradients that this scalar loss will backpropagate; the loss is unchanged.

        The gradients are bitwise equal to those of ``scaler.scale(loss).backward()``. A loss that
        requires no gradient (eval mode) is ignored.
        """
        if not self._enabled or not loss.requires_grad:
            return
        self._make_ready(loss.device)
        assert self._scale is not None
        scale = self._scale.to(loss.device, non_blocking=True)
        loss.register_hook(self._begin_backward)  # type: ignore[no-untyped-call]
        loss.register_hook(lambda grad: (grad * scale).type(grad.dtype))  # type: ignore[no-untyped-call]

    def unscale_once(self, optimizer: torch.optim.Optimizer) -> None:
        """Call ``unscale_`` before clipping, unless this step's gradients are already unscaled."""
        if not self.is_unscaled(optimizer):
            self.unscale_(optimizer)

    def is_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this step's gradients have been unscaled, or the scaler is disabled."""
        if not self._enabled:
            return True
        return self._per_optimizer_states[id(optimizer)]["stage"] is not OptState.READY

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, and test whether a rank has a non-finite gradient."""
        if not self._enabled:
            return
        if self._check is not None:
            self._check(optimizer)
            self._check = None
        if not self._ranks_checked:
            check_ranks(self.process_group)
            self._ranks_checked = True
        self._make_ready()
        self.scaled = False
        if dist.is_available() and dist.is_initialized():
            super().unscale_(optimizer)
        else:
            super(ShardedGradScaler, self).unscale_(optimizer)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool = True,
    ) -> dict[torch.device, torch.Tensor]:
        # allow_fp16=True: without a process group GradScaler would raise an error for fp16
        # gradients, which FSDP frameworks use on purpose.
        return super()._unscale_grads_(_shards(optimizer), inv_scale, found_inf, True)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Take the optimizer's step, or skip it if a gradient of any rank is not finite."""
        if not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        self.unscale_once(optimizer)
        before, self._overflow = self._overflow, None
        with _as_others(optimizer):
            result = super().step(optimizer, *args, **kwargs)
        self._overflow = bool(self._overflow or before)
        return result

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: Any, *args: Any, **kwargs: Any
    ) -> float | None:
        self._look(optimizer_state)
        return None if self._overflow else optimizer.step(*args, **kwargs)

    def _look(self, optimizer_state: Any) -> None:
        assert self._scale is not None
        flags = optimizer_state["found_inf_per_device"].values()
        values = [self._scale, *(flag.to(self._scale.device, non_blocking=True) for flag in flags)]
        self._last_scale, *overflows = torch.cat([value.reshape(1) for value in values]).tolist()
        self._overflow = any(overflows)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the scale after the step, within its bounds, and count the step.

        Raises:
            LossScaleError: ``max_skips`` steps in a row were skipped.
        """
        super().update(new_scale)
        self.scaled = False
        if not self._enabled:
            return
        assert self._scale is not None
        self._scale.clamp_(min=self._min_scale, max=MAX_SCALE)
        overflow, self._overflow = self._overflow, None
        if overflow is not None:
            # Computed, because a read of ``_scale`` would wait for the device.
            after = max(self.loss_scale * self.get_backoff_factor(), self._min_scale)
            self.counter.note(overflow, self.loss_scale, after)

    def state_dict(self) -> dict[str, Any]:
        """Return GradScaler's state and ``min_scale``, the lower bound of the scale."""
        state: dict[str, Any] = super().state_dict()
        return {**state, "min_scale": self._min_scale} if state else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore scale, growth tracker and settings, as GradScaler does, and ``min_scale``.

        If the state has no ``min_scale``, the settings' is used, lowered to the state's scale.
        """
        super().load_state_dict(state_dict)
        if self._enabled:
            least = state_dict.get("min_scale", self.settings.min_scale)
            self._min_scale = min(least, state_dict["scale"])
        self._last_scale = None

    def reset(self) -> None:
        """Reset the scale to the settings' initial scale, and all counters to 0."""
        scale = {"scale": self.settings.init_scale, "_growth_tracker": 0}
        self.load_state_dict({**vars(self.settings), **scale})
        self.counter = SkipCounter(self.settings.max_skips)

    def settle(self, optimizer: torch.optim.Optimizer, *, skipped: bool = False) -> None:
        """Update the scale after a framework's loop took a step, or skipped it as non-finite.

        For a loop that tests the norm of the unscaled gradients itself, and calls ``unscale_once``
        before each step and ``settle`` after it instead of this scaler's ``step``. ``skipped``: the
        loop took no step, on any rank. That is an overflow, even if only the norm is not finite.

        Raises:
            LossScaleError: see ``update``.
        """
        if not self._enabled:
            return
        self.unscale_once(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        for flag in state["found_inf_per_device"].values() if skipped else ():
            flag.fill_(1)
        self._look(state)
        self.update()

    def forget(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the stage and the overflow flags of a step that an exception ended."""
        if not self._enabled:
            return
        self._per_optimizer_states.pop(id(optimizer), None)
        self._overflow, self.scaled = None, False

    def _make_ready(self, device: torch.device | None = None) -> None:
        # torch creates the scale's tensor in scale(), which attach() never calls.
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device or torch.device(self._device))
