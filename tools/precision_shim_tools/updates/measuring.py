"""Measure which of an optimizer's updates are rounded away, in hooks of the optimizer's step.

At every n-th step the meter compares the change of sampled stored numbers with the optimizer's own
formula in fp64. Counts go to the host asynchronously, and are read when a later step begins. The
meter changes nothing that a step reads or writes, and draws no random number.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from precision_shim.auditing import meters
from precision_shim.precision.dtypes import name_of
from precision_shim.reporting import journal as _journal

from . import lost
from .copies import Copies
from .rules import Ideal, Rule, StoredState, UnknownRuleError
from .sampling import MOST_ELEMENTS, Tensors, numel, sample


@dataclass(frozen=True)
class _BeforeStep:
    """Some parameters of one group before a step, on one device and with copies of one dtype.

    ``copy`` and ``copies`` are the dtype and the values of the rollout engines' copies.
    """

    number: int
    group: dict[str, Any]
    tensors: Tensors
    copy: torch.dtype | None
    copies: torch.Tensor | None
    stored: StoredState
    ideal: Ideal


@dataclass(frozen=True)
class _Counted:
    """Counts being copied to the host; ``event`` is recorded after the copy, ``None`` on the host.

    ``weights``, ``exp_avg_sq`` and ``copy`` are how the numbers are stored; empty for none.
    """

    number: int
    counts: torch.Tensor
    event: Any
    sampled: int
    weights: str
    exp_avg_sq: str
    copy: str


class Meter:
    """Measures which updates one torch optimizer loses to rounding, in hooks around its steps.

    Args:
        stepper: the optimizer.
        every: number of steps from one measurement to the next.
        names: framework and version, and the name of the optimizer's part, for messages.
        copies: the dtypes of the rollout engines' copies of the weights.
        on_figures: function that is called with the meter when ``figures`` has changed.

    Attributes:
        figures: the latest figures, see ``lost.describe``; ``None`` before the first measurement.
        unmeasured: the reason why the meter does not measure; empty while the meter measures.
    """

    def __init__(
        self,
        stepper: torch.optim.Optimizer,
        every: int,
        names: tuple[str, str],
        copies: Copies,
        on_figures: Callable[[Meter], None] | None = None,
    ) -> None:
        self.every, self.names = every, names
        self.figures: dict[str, Any] | None = None
        self.unmeasured = ""
        self._stepper = weakref.ref(stepper)
        self._copies, self._on_figures = copies, on_figures
        self._step = 0
        self._before: list[_BeforeStep] = []
        self._pending: list[_Counted] = []
        self._pending_step = 0
        self._elements: list[int] = []  # for each group, how many the pending step updated
        self._warned: set[int] = set()
        self._handles: list[Any] = []
        try:
            self._rule = Rule(stepper)
        except UnknownRuleError as reason:
            self._give_up(str(reason))
            return
        self._handles.append(stepper.register_step_pre_hook(self._look_before))
        self._handles.append(stepper.register_step_post_hook(self._look_after))

    def remove(self) -> None:
        """Remove the hooks; never call ``remove`` within a step, which iterates over the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        stepper = self._stepper()
        if stepper is not None and meters.of(stepper) is self:
            del meters.by_stepper[stepper]

    def _give_up(self, reason: str) -> None:
        # The hooks stay registered, because torch is iterating over the hooks during this call.
        self.unmeasured = reason
        self._before, self._pending = [], []
        _journal.tell(f"{', '.join(self.names)}: lost updates are not measured: {reason}")

    def _look_before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.unmeasured or torch.compiler.is_compiling() or _captures():
            return
        try:
            self._read()
            self._step += 1
            self._before = []
            if self._step % self.every == 0 and not self._pending and _plain(args, kwargs):
                with torch.no_grad():
                    self._before = self._take(optimizer)
        except Exception as error:  # an error in the meter must not stop the training
            self._give_up(f"{type(error).__name__}: {error}")

    def _take(self, optimizer: torch.optim.Optimizer) -> list[_BeforeStep]:
        stepping = [
            [p for p in group["params"] if self._rule.gradient(optimizer, p) is not None]
            for group in optimizer.param_groups
        ]
        self._elements = [sum(map(numel, group)) for group in stepping]
        measuring = sum(not meter.unmeasured for meter in meters.by_stepper.values())
        taken = sample(stepping, MOST_ELEMENTS // max(1, measuring))
        rollout = meters.rollouts.get(optimizer)
        before = []
        for number, group in enumerate(optimizer.param_groups):
            alike: dict[Any, list[Any]] = {}
            for parameter, at in taken[number]:
                key = parameter.device, self._copies.dtype(parameter, rollout)
                alike.setdefault(key, []).append((parameter, at))
            for (_, copy), tensors in alike.items():
                stored = self._rule.read(optimizer, group, tensors)
                ideal = self._rule.ideal(optimizer, group, tensors, stored)
                copies = _copies(tensors, copy, stored.weights)
                before.append(_BeforeStep(number, group, tensors, copy, copies, stored, ideal))
        return before

    def _look_after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._before:
            return
        before, self._before = self._before, []
        try:
            with torch.no_grad():
                self._pending = [self._compare(optimizer, some) for some in before]
            self._pending_step = self._step
        except Exception as error:  # an error in the meter must not stop the training
            self._give_up(f"{type(error).__name__}: {error}")

    def _compare(self, optimizer: Any, before: _BeforeStep) -> _Counted:
        old, new = before.stored, self._rule.read(optimizer, before.group, before.tensors)
        # Leave out infinite numbers: an update cannot change them, even without rounding.
        updates = (before.ideal.update != 0) & old.weights.isfinite()
        decays = stuck = stale = torch.zeros_like(updates)
        moved, copy = before.ideal.exp_avg_sq, before.copy
        if moved is not None:
            second = old.states["exp_avg_sq"]
            decays = (moved < 0) & second.isfinite()
            stuck = decays & (new.states["exp_avg_sq"] == second)
        copies = _copies(before.tensors, copy, new.weights)
        if copies is not None:
            stale = updates & (copies == before.copies)
        lost_ones = updates & (new.weights == old.weights)
        counts = torch.stack([updates, lost_ones, decays, stuck, stale]).sum(1).double()
        overflow = getattr(optimizer, "found_inf", None)  # a fused step changes nothing on overflow
        if overflow is not None:
            counts = counts * (overflow == 0)
        counts = torch.cat([counts, counts.new_ones(1) * before.group["lr"]])
        parameters = [parameter for parameter, _ in before.tensors]
        states = [optimizer.state.get(p, {}).get("exp_avg_sq") for p in parameters]
        return _Counted(
            before.number,
            *_to_host(counts),
            sum(at.count for _, at in before.tensors),
            _join(self._rule.stored(optimizer, p) for p in parameters),
            "" if moved is None else _join(name_of(s.dtype) for s in states if s is not None),
            "" if copy is None else name_of(copy),
        )

    def _read(self) -> None:
        pending = self._pending
        if not all(counted.event is None or counted.event.query() for counted in pending):
            return
        self._pending = []
        groups = [
            _group(number, self._elements[number], list(parts))
            for number, parts in groupby(pending, lambda counted: counted.number)
        ]
        # A skipped step updates nothing: keep the earlier figures.
        moved = [
            group
            for group in groups
            if any(group[name] and group[name]["updates"] for name in ("weights", "exp_avg_sq"))
        ]
        if not moved:
            return
        self.figures = lost.describe(self._pending_step, self.every, moved)
        where, part = self.names
        for number, (*_, message) in lost.findings(self.figures, part, where):
            if number not in self._warned:
                self._warned.add(number)
                _journal.tell(message)
        if self._on_figures is not None:
            self._on_figures(self)


def _captures() -> bool:
    """Whether a CUDA graph is being captured; if so, the meter must not query an event."""
    begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return begun and torch.cuda.is_current_stream_capturing()


def _plain(args: Any, kwargs: Any) -> bool:
    """Whether the step has neither closure nor scaler (both change gradients within the step)."""
    given = (*args[1:], *kwargs.values())  # args[0] is the optimizer
    return all(value is None for value in given)


def _copies(
    tensors: Tensors, copy: torch.dtype | None, weights: torch.Tensor
) -> torch.Tensor | None:
    if copy is None:
        return None
    if all(parameter.dtype is copy for parameter, _ in tensors):
        return torch.cat([at.raw(parameter) for parameter, at in tensors])
    return weights.to(copy)


def _to_host(counts: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Begin to copy counts to the host; return the copy and the event after which it is there."""
    if counts.device.type == "cpu":
        return counts, None
    there = torch.empty(counts.shape, dtype=counts.dtype, device="cpu", pin_memory=True)
    module = getattr(torch, counts.device.type)  # such as torch.cuda
    there.copy_(counts, non_blocking=True)
    event = module.Event()
    event.record(module.current_stream(counts.device))
    return there, event


def _join(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names) - {""}))


def _group(number: int, elements: int, parts: Sequence[_Counted]) -> dict[str, Any]:
    rows = [part.counts.tolist() for part in parts]
    *sums, _ = map(sum, zip(*rows, strict=True))
    updates, missed, decays, stuck, stale = map(int, sums)
    copied = sum(int(row[0]) for row, part in zip(rows, parts, strict=True) if part.copy)
    return {
        "group": number,
        "lr": rows[0][-1],
        "elements": elements,
        "sampled": sum(part.sampled for part in parts),
        "weights": lost.count(_join(part.weights for part in parts), updates, missed),
        "exp_avg_sq": lost.count(_join(part.exp_avg_sq for part in parts), decays, stuck),
        "rollout": lost.count(_join(part.copy for part in parts), copied, stale),
    }
