"""``precision_shim.watch_updates``: gives each of a model's optimizers a meter for lost updates.

Here stands what a user calls, and which 16-bit copies a model's weights have. How a meter measures
stands in ``measuring``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..auditing import kept
from ..auditing.looking import where_of
from ..auditing.readers import read_optimizers
from ..auditing.reading import SIXTEEN_BIT, Owned, Reading
from ..errors import AuditError, SettingsError
from . import lost, meters
from .measuring import Copies, Meter


class UpdateWatch:
    """What ``watch_updates`` returns: the meters of a model's optimizers."""

    def __init__(self, watched: Sequence[Meter]) -> None:
        self._meters = tuple(watched)

    def figures(self) -> list[dict[str, Any]]:
        """The newest figures of each optimizer that has some, ready for JSON."""
        return [one.figures.to_dict() for one in self._meters if one.figures is not None]

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """The shares of lost updates over all optimizers.

        The names are ``updates_lost``, ``updates_lost_exp_avg_sq`` and ``updates_lost_rollout``.

        Args:
            prefix: goes before the names.
        """
        return lost.metrics([one.figures for one in self._meters if one.figures], prefix)

    def remove(self) -> None:
        """Stop measuring: take the hooks out."""
        for one in self._meters:
            one.remove()


def watch_updates(model: Any, optimizer: Any, every: int = 50) -> UpdateWatch:
    """Measure how many of an optimizer's updates are rounded away.

    Every ``every`` steps, on a fixed sample of each parameter group (at most 2^18 elements on a
    rank, over all optimizers), it counts the elements whose update was not zero and whose stored
    value did not change: of the weights that training continues from, of ``exp_avg_sq`` where it
    should have become smaller, and of the 16-bit copies that rollout engines get. From the next
    step on the figures are in the returned object, in ``audit(model, optimizer)`` and, where a
    framework's adapter reports them, in the framework's metrics. It warns if a group loses more
    than half of its updates. It changes no step's result, and the host waits for no device.

    ``precision_shim.uninstall()`` takes the hooks out, and so does the returned object's
    ``remove()``. A second call for an optimizer only changes ``every``.

    Args:
        model: as ``audit`` takes it; ``None`` to read the optimizer alone.
        optimizer: as ``audit`` takes it.
        every: number of steps from one measurement to the next.

    Returns:
        An object with the figures and with ``remove()``.

    Raises:
        AuditError: model or optimizer cannot be read.
        SettingsError: ``every`` is no whole number of at least 1.
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise SettingsError(
            f"watch_updates(every={every!r}) is not valid; allowed: a whole number >= 1. Correct "
            "it, or do not call watch_updates for never."
        )
    if optimizer is None:
        raise AuditError("watch_updates(optimizer=None): there are no steps to watch. Pass one.")
    readings = read_optimizers(model, optimizer)
    found = [attach(one, every, model=model) for one in readings]
    return UpdateWatch([one for one in found if one is not None])


def attach(
    reading: Reading,
    every: int,
    *,
    model: Any = None,
    framework: str = "",
    subject: str = "",
    on_figures: Callable[[Meter], None] | None = None,
) -> Meter | None:
    """Watch the updates of an optimizer that was read; ``None`` for one that steps nothing.

    Args:
        reading: the optimizer's reading.
        every: number of steps from one measurement to the next.
        model: the model's modules, for their compute dtype.
        framework: as in ``looking.look``.
        subject: which model, such as ``"actor"``.
        on_figures: called with the meter when there are new figures.
    """
    if not reading.steppers:
        return None
    stepper = reading.steppers[0]
    known = meters.of(stepper)
    if known is not None:
        known.every = every
        return known
    where = where_of(framework, reading.framework)
    names = (f"{where}, {subject}" if subject else where, reading.name)
    meter = Meter(stepper, every, names, _copies(reading, stepper, model), on_figures)
    meters.add(stepper, meter)
    # A strong reference in this list would keep the optimizer's tensors alive until uninstall().
    weak = weakref.ref(meter)
    kept.at_clear(lambda: None if (one := weak()) is None else one.remove())
    return meter


# -- the 16-bit copies -----------------------------------------------------------------------------


def _copies(reading: Reading, stepper: torch.optim.Optimizer, model: Any) -> Copies:
    by_tensor = {id(one.stepped): one for one in reading.owned}
    in_model = {p.dtype for p in (*reading.trainable, *_parameters(model))} & set(SIXTEEN_BIT)
    otherwise = next(iter(in_model)) if len(in_model) == 1 else _compute_dtype(model)
    return [
        [_copy_of(by_tensor.get(id(p)), otherwise) for p in group["params"]]
        for group in stepper.param_groups
    ]


def _copy_of(owned: Owned | None, otherwise: torch.dtype) -> torch.dtype | None:
    if owned is None or owned.dtype is torch.float32:
        return otherwise
    return owned.dtype if owned.dtype in SIXTEEN_BIT else None


def _chunks(model: Any) -> list[torch.nn.Module]:
    several = model if isinstance(model, (list, tuple)) else [model]
    return [one for one in several if isinstance(one, torch.nn.Module)]


def _parameters(model: Any) -> list[torch.Tensor]:
    return [p for chunk in _chunks(model) for p in chunk.parameters() if p.requires_grad]


def _compute_dtype(model: Any) -> torch.dtype:
    """FSDP's 16-bit compute dtype; where it has none, bf16, which rollout engines use."""
    for module in (module for chunk in _chunks(model) for module in chunk.modules()):
        state = getattr(module, "_get_fsdp_state", None)  # FSDP2 has no public name for it
        policy = getattr(state(), "_mp_policy", None) if callable(state) else None
        for mixed in (policy, getattr(module, "mixed_precision", None)):
            dtype = getattr(mixed, "param_dtype", None)
            if dtype in SIXTEEN_BIT:
                return dtype  # type: ignore[no-any-return]
    return torch.bfloat16
