"""``precision_shim.watch_updates``: attach a lost-update meter to each of a model's optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from precision_shim.auditing import latest, meters
from precision_shim.auditing.audits import where_of
from precision_shim.auditing.readers import read_optimizers
from precision_shim.auditing.reading import Reading
from precision_shim.errors import AuditError, DtypeError, SettingsError
from precision_shim.precision.dtypes import coerce_dtype, name_of

from . import lost
from .copies import Copies
from .measuring import Meter


class UpdateWatch:
    """The result of ``watch_updates``: the meters of a model's optimizers."""

    def __init__(self, watched: Sequence[Meter]) -> None:
        self._meters = tuple(watched)

    def figures(self) -> list[dict[str, Any]]:
        """Return the latest figures of each measured optimizer, as data that JSON can represent."""
        return [meter.figures for meter in self._meters if meter.figures is not None]

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Return the shares of lost updates over all optimizers, for a framework's metrics.

        The names, after ``prefix``, are ``updates_lost``, ``updates_lost_exp_avg_sq`` and
        ``updates_lost_rollout``.
        """
        return lost.metrics([meter.figures for meter in self._meters if meter.figures], prefix)

    def remove(self) -> None:
        """Stop measuring: remove the hooks from the optimizers."""
        for meter in self._meters:
            meter.remove()


def watch_updates(
    model: Any, optimizer: Any, every: int = 50, *, rollout: Any = None
) -> UpdateWatch:
    """Measure how many of an optimizer's updates are rounded away.

    At every ``every``-th step, each meter uses a fixed sample of each parameter group (at most 2^18
    elements on a rank, over all optimizers). It counts the elements whose update was not zero but
    whose stored value did not change: for the weights that the optimizer updates (masters if any),
    for decreases of ``exp_avg_sq``, and for the rollout engines' copies. When a later step begins,
    the figures appear in the returned object, in ``audit(model, optimizer)``, and in the metrics of
    some frameworks. The meter warns if a group loses more than half of its updates. It does not
    change the result of a step, and the host does not wait for a device.

    ``precision_shim.uninstall()`` and the returned object's ``remove()`` remove the hooks. A second
    call for an optimizer changes only ``every`` and, if given, ``rollout``.

    Args:
        model: the model, in any form that ``audit`` accepts; ``None`` to read the optimizer alone.
        optimizer: the optimizer, in any form that ``audit`` accepts.
        every: number of steps from one measurement to the next.
        rollout: the dtype that the rollout engine computes in, as a ``torch.dtype`` or a name.
            By default the dtype that an adapter recorded, else the model's 16-bit dtype, else
            FSDP's compute dtype, else bf16. LoRA's factors (also all parameters of a model that is
            mostly frozen or ``None``) count as copies only if an adapter recorded that the engine
            receives them.

    Returns:
        An ``UpdateWatch``, which has the figures and ``remove()``.

    Raises:
        AuditError: model or optimizer cannot be read.
        DtypeError: ``rollout`` is not fp32, bf16 or fp16.
        SettingsError: the argument ``every`` is not a whole number of at least 1.
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise SettingsError(
            f"watch_updates(every={every!r}) is not valid; allowed: a whole number >= 1. Correct "
            "it, or do not call watch_updates for never."
        )
    if optimizer is None:
        raise AuditError("watch_updates(optimizer=None): there are no steps to watch. Pass one.")
    dtype = coerce_dtype(rollout, key="rollout", where="watch_updates")
    if dtype is not None and dtype not in meters.DTYPES:
        raise DtypeError(
            f"watch_updates(rollout={rollout!r}): no rollout engine's copies are measured in it; "
            "allowed: float16, bfloat16, float32 or None. Correct it, or leave it out."
        )
    readings = read_optimizers(model, optimizer)
    if isinstance(dtype, torch.dtype):
        for reading in readings:
            meters.tell_rollout(reading.steppers, name_of(dtype))
    return UpdateWatch(list(filter(None, (attach(each, every, model=model) for each in readings))))


def attach(
    reading: Reading,
    every: int,
    *,
    model: Any = None,
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
    stepper = reading.steppers[0]
    known: Meter | None = meters.of(stepper)
    if known is not None:
        known.every = every
        return known
    where = where_of(framework, reading.framework)
    names = (f"{where}, {subject}" if subject else where, reading.name)
    meter = Meter(stepper, every, names, Copies(reading, model), on_figures)
    meters.by_stepper[stepper] = meter
    # A strong reference in ``latest`` would keep the optimizer's tensors alive until uninstall().
    weak = weakref.ref(meter)
    latest.at_clear(lambda: None if (watch := weak()) is None else watch.remove())
    return meter
