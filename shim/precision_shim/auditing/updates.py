"""The lost-update meter: the share of an optimizer's updates that rounding loses.

Around every n-th step, hooks read a sample of the stored weights (masters, where there are any) and
second moments. An update is lost if the number should have changed, and its bits did not. The meter
changes nothing that a step reads or writes. A worker imports this module only to measure.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ..errors import AuditError, SettingsError
from ..precision.dtypes import name_of
from ..reporting import journal as _journal
from . import latest, meters
from .audits import where_of
from .readers import read_optimizers
from .reading import SIXTEEN_BIT, Reading, local
from .record import Finding
from .rules import lost_updates

_MOST_ELEMENTS, _MOST_TENSORS = 1 << 18, 512
"""Maximum numbers of elements and tensors in the sample of one optimizer."""


class UpdateWatch:
    """The result of ``watch_updates``: the meters of a model's optimizers."""

    def __init__(self, watched: tuple[Meter, ...]) -> None:
        self._meters = watched

    def figures(self) -> list[dict[str, Any]]:
        """Return the latest figures of each measured optimizer, as data that JSON can represent.

        The shares of lost updates are under ``weights`` and ``exp_avg_sq``, ``None`` if not
        measured, and the dtypes in which these are stored under ``dtypes``.
        """
        return [meter.figures for meter in self._meters if meter.figures is not None]

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Return the shares over all optimizers, as ``updates_lost`` and ``..._exp_avg_sq``."""
        return meters.shares(self._meters, prefix)

    def remove(self) -> None:
        """Stop measuring: remove the hooks from the optimizers."""
        for meter in self._meters:
            meter.remove()


def watch_updates(model: Any, optimizer: Any, every: int = 50) -> UpdateWatch:
    """Measure how many of an optimizer's updates are rounded away.

    At every ``every``-th step the meter reads evenly spaced elements (at most 2^18 of an optimizer)
    of the weights that the optimizer updates (masters if any), and of ``exp_avg_sq``. It counts
    those that should have changed, or for ``exp_avg_sq`` become smaller, and kept their value. When
    the next step begins, the figures appear in the returned object, in ``audit(model, optimizer)``,
    and in the metrics of some frameworks. The meter warns if more than half of the weights' updates
    are lost. It does not change the result of a step; the host waits
    for the device once after each measured step.

    ``precision_shim.uninstall()`` and the returned object's ``remove()`` remove the hooks. A second
    call for an optimizer changes only ``every``.

    Args:
        model: the model, in any form that ``audit`` accepts; ``None`` to read the optimizer alone.
        optimizer: the optimizer, in any form that ``audit`` accepts.
        every: number of steps from one measurement to the next.

    Returns:
        An ``UpdateWatch``, which has the figures and ``remove()``.

    Raises:
        AuditError: model or optimizer cannot be read.
        SettingsError: the argument ``every`` is not a whole number of at least 1.
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise SettingsError(
            f"watch_updates(every={every!r}) is not valid; allowed: a whole number >= 1. Correct "
            "it, or do not call watch_updates for never."
        )
    if optimizer is None:
        raise AuditError("watch_updates(optimizer=None): there are no steps to watch. Pass one.")
    found = (attach(reading, every) for reading in read_optimizers(model, optimizer))
    return UpdateWatch(tuple(filter(None, found)))


def attach(
    reading: Reading,
    every: int,
    *,
    framework: str = "",
    subject: str = "",
    on_figures: Callable[[Meter], None] | None = None,
) -> Meter | None:
    """Attach a meter to the torch optimizer of a ``Reading``; ``None`` if there is no optimizer.

    ``on_figures`` is called when the meter has new figures. ``framework``, ``subject``: see
    ``audits.look``.
    """
    if not reading.steppers:
        return None
    meter: Meter | None = meters.by_stepper.get(reading.steppers[0])
    if meter is not None:
        meter.every = every
        return meter
    where = ", ".join(filter(None, (where_of(framework, reading.framework), subject)))
    return Meter(reading, every, where, on_figures)


Hook = Callable[["Meter", Any, Any, Any], None]


def _harmless(hook: Hook) -> Hook:
    """Let no error in the meter stop the training."""

    @functools.wraps(hook)
    def guarded(self: Meter, optimizer: Any, args: Any, kwargs: Any) -> None:
        try:
            if not self.failed:
                hook(self, optimizer, args, kwargs)
        except Exception as error:
            self.failed = True
            _journal.warn_or_say(f"{self.where}: lost updates are not measured: {error!r}")

    return guarded


class Meter:
    """Measures one torch optimizer, in hooks around its steps.

    Attributes:
        every: number of steps from one measurement to the next.
        part: the optimizer's part of the model, such as ``"experts"``.
        figures: the latest figures; ``None`` before the first measurement.
        counts: for each of ``meters.METRICS``, how many updates there were and how many were lost.
        notes: the audit's notes on the figures.
        where: the framework, the model and the part, for messages.
        failed: whether an error has ended the measurements.
    """

    def __init__(
        self,
        reading: Reading,
        every: int,
        where: str,
        on_figures: Callable[[Meter], None] | None = None,
    ) -> None:
        self.every, self.part = every, reading.name
        self.figures: dict[str, Any] | None = None
        self.counts: dict[str, tuple[float, float]] = {}
        self.notes: list[Finding] = []
        self.where, self._on_figures = f"{where}, {reading.name}", on_figures
        self.failed = False
        in_states = reading.declared_states.master is not None
        outside = any(one.stepped.dtype in SIXTEEN_BIT and one.masters for one in reading.owned)
        self._elsewhere = reading.keeps_small_updates or (outside and not in_states)
        self._step = 0
        self._before: list[_Before] = []
        self._sums: dict[tuple[str, str, torch.device], torch.Tensor] = {}
        self._warned = False
        stepper = reading.steppers[0]
        self._stepper = weakref.ref(stepper)
        self._handles = [
            stepper.register_step_pre_hook(self._look_before),
            stepper.register_step_post_hook(self._look_after),
        ]
        meters.by_stepper[stepper] = self
        # A strong reference would keep the optimizer alive until uninstall().
        weak = weakref.ref(self)
        latest.at_clear(lambda: None if (meter := weak()) is None else meter.remove())

    def remove(self) -> None:
        """Remove the hooks; never call ``remove`` within a step, which iterates over the hooks."""
        for handle in self._handles:
            handle.remove()
        stepper = self._stepper()
        if stepper is not None and meters.by_stepper.get(stepper) is self:
            del meters.by_stepper[stepper]

    @_harmless
    def _look_before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if torch.compiler.is_compiling() or (cuda and torch.cuda.is_current_stream_capturing()):
            return
        self._read()
        self._step += 1
        plain = all(given is None for given in (*args[1:], *kwargs.values()))  # args[0]: optimizer
        measures = plain and self._step % self.every == 0  # a closure computes gradients later
        self._before = list(_take(optimizer, self._elsewhere)) if measures else []

    @_harmless
    def _look_after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        overflow = getattr(optimizer, "found_inf", None)  # a fused step changes nothing on overflow
        for one in self._before:
            for name, stored, counts in one.compare(optimizer):
                counted = counts if overflow is None else counts * (overflow == 0)
                key = name, stored, counts.device
                self._sums[key] = self._sums[key] + counted if key in self._sums else counted
        self._before = []

    def _read(self) -> None:
        sums, self._sums = self._sums, {}
        counts: dict[str, tuple[float, float]] = {}
        dtypes: dict[str, list[str]] = {}
        for (name, stored, _), counted in sums.items():
            updates, lost = counted.tolist()
            if updates:
                of_all = counts.get(name, (0.0, 0.0))
                counts[name] = of_all[0] + updates, of_all[1] + lost
                dtypes.setdefault(name, []).append(stored)
        if not counts:  # the step was skipped, or its weights are stored elsewhere
            return
        self.counts = counts
        self.figures = {
            "step": self._step,
            "every": self.every,
            **{name: meters.share([self], name) for name in meters.METRICS},
            "dtypes": {name: ", ".join(sorted(set(each))) for name, each in dtypes.items()},
        }
        self.notes = list(lost_updates(self.figures, self.part, self.where))
        if self.notes and not self._warned:
            self._warned = True
            _journal.warn_or_say(self.notes[0].message)
        if self._on_figures is not None:
            self._on_figures(self)


class _Before(NamedTuple):
    """A tensor that an optimizer steps, with samples of its numbers before the step.

    ``weights`` has the tensors whose bits are the weight: a parameter, its master, or the parameter
    and the low bits of its master.
    """

    at: Callable[[torch.Tensor], torch.Tensor]
    apart: int
    stepped: torch.Tensor
    group: Mapping[str, Any]
    slope: torch.Tensor
    weights: list[torch.Tensor]
    second: torch.Tensor | None

    def compare(self, optimizer: Any) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield name, dtypes, and the numbers of updates and of lost ones, after the step."""
        state, second = optimizer.state.get(self.stepped, {}), self.second
        if self.weights:
            moment = state.get("exp_avg", state.get("momentum_buffer"))
            changing = (self.slope if moment is None else self.at(moment)) != 0
            changing = changing | (self.weights[0] * self.group.get("weight_decay", 0.0) != 0)
            changing = changing & self.weights[0].isfinite() & (self.group["lr"] != 0)
            new = map(self.at, _weights(optimizer, self.stepped))
            kept = [one == before for one, before in zip(new, self.weights, strict=True)]
            stored = "+".join(name_of(one.dtype) for one in self.weights)
            yield "weights", stored, self._count(changing, torch.stack(kept).all(0))
        if second is not None:
            changing = (self.slope * self.slope < second.double()) & second.isfinite()
            same = self.at(state["exp_avg_sq"]) == second
            yield "exp_avg_sq", name_of(second.dtype), self._count(changing, same)

    def _count(self, changing: torch.Tensor, same: torch.Tensor) -> torch.Tensor:
        return torch.stack([changing.sum(), (changing & same).sum()]).double() * self.apart


def _weights(optimizer: Any, stepped: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that store a weight; none if its master is not in its state."""
    master = optimizer.state.get(stepped, {}).get("master_param")
    if stepped.dtype not in SIXTEEN_BIT or not getattr(optimizer, "master_weights", False):
        return [stepped]
    if master is None:
        return []
    return [master] if master.is_floating_point() else [stepped, master]


def _take(optimizer: Any, elsewhere: bool) -> Iterator[_Before]:
    """Read the sample; ``elsewhere``: masters of 16-bit weights are in no state of theirs."""
    scale = getattr(optimizer, "grad_scale", None)  # set by GradScaler for a fused step
    # FusedAdam scales 8-bit and fp16 states anew in each step, and so changes all of their bits.
    dtypes = getattr(optimizer, "name_to_dtype_map", {})
    scaled = {name for name, dtype in dtypes.items() if dtype in (torch.float16, torch.uint8)}
    decoupled = getattr(optimizer, "use_decoupled_grad", False)
    sampled = [
        (p, gradient, group)
        for group in optimizer.param_groups
        for p in group["params"]
        if (gradient := getattr(p, "decoupled_grad" if decoupled else "grad", None)) is not None
        and not gradient.is_sparse
    ]
    tensors = -(-len(sampled) // _MOST_TENSORS) or 1
    sampled = sampled[::tensors]
    # An odd distance: an even one may divide a row's length, and sample one column only.
    apart = -(-sum(local(p).numel() for p, _, _ in sampled) // _MOST_ELEMENTS) | 1

    def at(tensor: torch.Tensor) -> torch.Tensor:
        return local(tensor).detach().reshape(-1)[::apart].clone()

    for p, gradient, group in sampled:
        weights = _weights(optimizer, p)
        if "master_param" in scaled or (elsewhere and p.dtype in SIXTEEN_BIT):
            weights = []
        second = optimizer.state.get(p, {}).get("exp_avg_sq")
        second = None if second is None or "exp_avg_sq" in scaled else at(second)
        slope = at(gradient).double()
        slope = slope if scale is None else slope / scale
        yield _Before(at, apart * tensors, p, group, slope, list(map(at, weights)), second)
