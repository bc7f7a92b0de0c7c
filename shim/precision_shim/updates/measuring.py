"""Measure which of an optimizer's updates are rounded away, in hooks of the optimizer's step.

At every n-th step the meter samples the stored numbers before and after the optimizer's step. The
meter compares the stored numbers' change with the change that the optimizer's own formula gives in
fp64. The meter copies its counts to the host asynchronously, and reads them at the beginning of a
later step. The meter changes nothing that a step reads or writes, and does not use torch's global
random generators.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..precision.dtypes import name_of
from ..reporting import journal as _journal
from . import lost, meters
from .copies import Chain, Copies, named
from .lost import Count, Figures, Group
from .rules import Rule, Sampled, Taken, UnknownRuleError
from .sampling import MOST_ELEMENTS, Sample, numel


@dataclass
class _Before:
    """Samples of some tensors of one group before a step, all on one device.

    Attributes:
        tensors: the parameters, each with the ``Taken`` that samples it.
        copy: the dtypes that copies for rollout engines are rounded to; ``None`` without copies.
        updates: for each element, whether the update is not zero.
        decays: for each element, whether the update should make the second moment smaller;
            ``None`` without a second moment.
        copies: the rollout engines' copies of the weights; ``None`` without copies.
    """

    group: int
    tensors: list[tuple[torch.Tensor, Taken]]
    copy: Chain | None
    updates: torch.Tensor
    weights: torch.Tensor
    decays: torch.Tensor | None
    exp_avg_sq: torch.Tensor | None
    copies: torch.Tensor | None
    lr: Any


@dataclass(frozen=True)
class _Counted:
    """Describes one row of counts: its parameter group, sample size and dtypes.

    Attributes:
        group: number of the group; ``None`` for matrices that LoRA is merged into.
        exp_avg_sq: dtype of the second moment; empty without a second moment.
        copy: how the copies for rollout engines are stored; empty without copies.
    """

    group: int | None
    sampled: int
    stored: str
    exp_avg_sq: str
    copy: str


@dataclass(frozen=True)
class _Pending:
    """Counts of lost updates, which are being copied to the host.

    Attributes:
        arriving: for each device, the host tensor that receives the counts, the event recorded
            after the copy, and a ``_Counted`` per row of the tensor.
        elements: for each group, the number of elements that the step updated on this rank.
    """

    step: int
    arriving: list[tuple[torch.Tensor, Any, list[_Counted]]]
    elements: dict[int, int]

    @property
    def is_there(self) -> bool:
        return all(event is None or event.query() for _, event, _ in self.arriving)


class Meter:
    """Measures which updates one torch optimizer loses to rounding, in hooks around its steps.

    Args:
        stepper: the optimizer.
        every: number of steps from one measurement to the next.
        names: framework and version, and the name of the optimizer's part, for messages.
        copies: the model's properties that determine the rollout engines' copies of the weights.
        on_figures: function that is called with the meter when ``figures`` has changed.

    Attributes:
        figures: the latest figures; ``None`` before the first measurement.
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
        self.figures: Figures | None = None
        self.unmeasured = ""
        self._stepper = weakref.ref(stepper)
        self._copies, self._on_figures = copies, on_figures
        self._step = 0
        self._sample: Sample | None = None
        self._before: list[_Before] = []
        self._elements: dict[int, int] = {}
        self._pending: _Pending | None = None
        self._warned: set[int] = set()
        self._handles: list[Any] = []
        try:
            self._rule = Rule(stepper)
        except UnknownRuleError as reason:
            self._give_up(str(reason))
            return
        self._handles.append(stepper.register_step_pre_hook(self._look_before))
        self._handles.append(stepper.register_step_post_hook(self._look_after))

    @property
    def measures(self) -> bool:
        """Whether the meter measures steps."""
        return not self.unmeasured

    def remove(self) -> None:
        """Remove the hooks; never call ``remove`` within a step, which iterates over the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        stepper = self._stepper()
        if stepper is not None and meters.of(stepper) is self:
            meters.drop(stepper)

    def _give_up(self, reason: str) -> None:
        # The hooks stay registered, because torch is iterating over the hooks during this call.
        self.unmeasured = reason
        self._before, self._pending, self._sample = [], None, None
        self._say(f"lost updates are not measured: {reason}")

    def _say(self, what: str) -> None:
        _journal.tell(f"{', '.join(self.names)}: {what}")

    def _look_before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.unmeasured or torch.compiler.is_compiling() or _captures():
            return
        try:
            self._read()
            self._step += 1
            self._before = []
            if self._step % self.every == 0 and self._pending is None and _plain(args, kwargs):
                with torch.no_grad():
                    self._before = self._take(optimizer)
        except Exception as error:  # an error in the meter must not stop the training
            self._give_up(f"{type(error).__name__}: {error}")

    def _take(self, optimizer: torch.optim.Optimizer) -> list[_Before]:
        groups = [group["params"] for group in optimizer.param_groups]
        budget = MOST_ELEMENTS // max(1, meters.count())
        places = [
            [place for place, p in enumerate(group) if self._rule.steps_ever(optimizer, p)]
            for group in groups
        ]
        if self._sample is None or not self._sample.fits(groups, budget, places):
            self._sample = Sample(groups, budget, places)
        self._elements = {
            number: sum(numel(p) for p in group if self._rule.gradient(optimizer, p) is not None)
            for number, group in enumerate(groups)
        }
        snapshots = []
        rollout = meters.rollout_of(optimizer)
        reason = self._copies.merged.take(rollout) if rollout is not None else ""
        if reason:
            self._say(f"the lost updates of the rollout's copies are not measured: {reason}")
        for number, group in enumerate(optimizer.param_groups):
            alike: dict[Any, list[tuple[torch.Tensor, Taken]]] = {}
            for place, at in self._sample.taken[number].items():
                parameter = group["params"][place]
                if self._rule.gradient(optimizer, parameter) is None:
                    continue
                if parameter.dtype.is_floating_point:
                    key = parameter.device, self._copies.chain(number, place, rollout)
                    alike.setdefault(key, []).append((parameter, at))
            snapshots += [
                self._take_some(optimizer, number, group, tensors, copy)
                for (_, copy), tensors in alike.items()
            ]
        return snapshots

    def _take_some(
        self,
        optimizer: torch.optim.Optimizer,
        number: int,
        group: Mapping[str, Any],
        tensors: list[tuple[torch.Tensor, Taken]],
        copy: Chain | None,
    ) -> _Before:
        sampled = self._read_sample(optimizer, group, tensors)
        ideal = self._rule.ideal(optimizer, group, sampled)
        # Leave out infinite numbers: an update cannot change them, even without rounding.
        decays = second = None
        if ideal.exp_avg_sq is not None:
            second = sampled.states["exp_avg_sq"]
            decays = (ideal.exp_avg_sq < 0) & second.isfinite()
        return _Before(
            number,
            tensors,
            copy,
            (ideal.update != 0) & sampled.weights.isfinite(),
            sampled.weights,
            decays,
            second,
            self._rollout(tensors, copy, sampled.weights),
            group["lr"],
        )

    def _read_sample(
        self, optimizer: Any, group: Mapping[str, Any], tensors: Sequence[tuple[Any, Taken]]
    ) -> Sampled:
        rule = self._rule
        scale = getattr(optimizer, "grad_scale", None)  # set by GradScaler for a fused step
        gradients, steps = [], []
        states: dict[str, list[torch.Tensor]] = {name: [] for name in rule.states(group)}
        for parameter, at in tensors:
            gradient = rule.gradient(optimizer, parameter)
            assert gradient is not None
            taken = at(gradient)
            gradients.append(taken if scale is None else taken / scale)
            for name, some in states.items():
                state = rule.state(optimizer, parameter, name, at)
                some.append(torch.zeros_like(taken) if state is None else state)
            steps.append(rule.steps(optimizer, group, parameter, at))
        return Sampled(
            self._weights(optimizer, tensors),
            torch.cat(gradients),
            {name: torch.cat(some) for name, some in states.items()},
            torch.cat(steps),
        )

    def _weights(self, optimizer: Any, tensors: Sequence[tuple[Any, Taken]]) -> torch.Tensor:
        return torch.cat([self._rule.weights(optimizer, p, at) for p, at in tensors])

    @staticmethod
    def _rollout(
        tensors: Sequence[tuple[torch.Tensor, Taken]],
        copy: Chain | None,
        weights: torch.Tensor,
    ) -> torch.Tensor | None:
        if copy is None:
            return None
        if all(parameter.dtype is copy[0] for parameter, _ in tensors):
            weights = torch.cat([at.raw(parameter) for parameter, at in tensors])
        for dtype in copy:
            weights = weights.to(dtype)
        return weights

    def _look_after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._before:
            return
        before, self._before = self._before, []
        try:
            with torch.no_grad():
                self._pending = self._compare(optimizer, before)
        except Exception as error:  # an error in the meter must not stop the training
            self._give_up(f"{type(error).__name__}: {error}")

    def _compare(self, optimizer: torch.optim.Optimizer, before: list[_Before]) -> _Pending:
        rows: dict[torch.device, tuple[list[torch.Tensor], list[_Counted]]] = {}
        for sample in before:
            vectors, about = rows.setdefault(sample.weights.device, ([], []))
            vectors.append(self._count(optimizer, sample))
            about.append(self._describe(optimizer, sample))
        for device, changed, stale, sampled, chain in self._copies.merged.compare():
            vectors, about = rows.setdefault(device, ([], []))
            none = torch.zeros_like(changed)
            counts = torch.stack([changed, none, none, none, stale, none]).double()
            vectors.append(counts)
            about.append(_Counted(None, sampled, "", "", named(chain)))
        arriving = []
        for device, (vectors, about) in rows.items():
            counts = torch.stack(vectors)
            event = None
            if device.type != "cpu":
                there = torch.empty(counts.shape, dtype=counts.dtype, device="cpu", pin_memory=True)
                counts = there.copy_(counts, non_blocking=True)
                module = getattr(torch, device.type)  # such as torch.cuda
                event = module.Event()
                event.record(module.current_stream(device))
            arriving.append((counts, event, about))
        return _Pending(self._step, arriving, self._elements)

    def _count(self, optimizer: Any, sample: _Before) -> torch.Tensor:
        weights = self._weights(optimizer, sample.tensors)
        none = torch.zeros((), dtype=torch.int64, device=weights.device)
        decays = stuck = stale = none
        if sample.decays is not None:
            second = [
                state
                for p, at in sample.tensors
                if (state := self._rule.state(optimizer, p, "exp_avg_sq", at)) is not None
            ]
            decays = sample.decays.sum()
            stuck = (sample.decays & (torch.cat(second) == sample.exp_avg_sq)).sum()
        if sample.copies is not None:
            copies = self._rollout(sample.tensors, sample.copy, weights)
            stale = (sample.updates & (copies == sample.copies)).sum()
        lost_ones = (sample.updates & (weights == sample.weights)).sum()
        counts = torch.stack([sample.updates.sum(), lost_ones, decays, stuck, stale]).double()
        overflow = getattr(optimizer, "found_inf", None)  # a fused step changes nothing on overflow
        if overflow is not None:
            counts = counts * (overflow == 0)
        return torch.cat([counts, counts.new_ones(1) * sample.lr])

    def _describe(self, optimizer: Any, sample: _Before) -> _Counted:
        parameters = [parameter for parameter, _ in sample.tensors]
        states = (optimizer.state.get(p, {}).get("exp_avg_sq") for p in parameters)
        second = {state.dtype for state in states if state is not None}
        return _Counted(
            sample.group,
            sum(at.count for _, at in sample.tensors),
            _join(self._rule.stored(optimizer, p) for p in parameters),
            _join(map(name_of, second)) if sample.decays is not None else "",
            named(sample.copy) if sample.copy is not None else "",
        )

    def _read(self) -> None:
        pending = self._pending
        if pending is None or not pending.is_there:
            return
        self._pending = None
        rows: dict[int, list[tuple[list[float], _Counted]]] = {}
        merged: list[tuple[list[float], _Counted]] = []
        for counts, _, about in pending.arriving:
            for numbers, row in zip(counts.tolist(), about, strict=True):
                kind = merged if row.group is None else rows.setdefault(row.group, [])
                kind.append((numbers, row))
        groups = [
            _group(number, pending.elements[number], some) for number, some in sorted(rows.items())
        ]
        # A skipped step updates nothing: keep the earlier figures.
        moved = tuple(
            group
            for group in groups
            if group.weights.updates or (group.exp_avg_sq is not None and group.exp_avg_sq.updates)
        )
        if not moved:
            return
        self.figures = Figures(pending.step, self.every, moved, _count_copied(merged))
        self._judge(self.figures)
        if self._on_figures is not None:
            self._on_figures(self)

    def _judge(self, figures: Figures) -> None:
        where, part = self.names
        for group, (*_, message) in lost.findings(figures.to_dict(), part, where):
            if group not in self._warned:
                self._warned.add(group)
                _journal.tell(message)


def _captures() -> bool:
    """Whether a CUDA graph is being captured; if so, the meter must not query an event."""
    begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return begun and torch.cuda.is_current_stream_capturing()


def _plain(args: Any, kwargs: Any) -> bool:
    """Whether the step has neither closure nor scaler (both change gradients within the step)."""
    given = (*args[1:], *kwargs.values())  # args[0] is the optimizer
    return all(value is None for value in given)


def _join(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names)))


def _group(number: int, elements: int, rows: Sequence[tuple[list[float], _Counted]]) -> Group:
    updates, missed, decays, stuck = (
        sum(int(numbers[column]) for numbers, _ in rows) for column in range(4)
    )
    second = _join(row.exp_avg_sq for _, row in rows if row.exp_avg_sq)
    return Group(
        group=number,
        lr=rows[0][0][-1],
        elements=elements,
        sampled=sum(row.sampled for _, row in rows),
        weights=Count(_join(row.stored for _, row in rows), updates, missed),
        exp_avg_sq=Count(second, decays, stuck) if second else None,
        rollout=_count_copied(rows),
    )


def _count_copied(rows: Sequence[tuple[list[float], _Counted]]) -> Count | None:
    copied = [(numbers, row) for numbers, row in rows if row.copy]
    if not copied:
        return None
    updates, stale = (sum(int(numbers[column]) for numbers, _ in copied) for column in (0, 4))
    return Count(_join(row.copy for _, row in copied), updates, stale)
