"""Tell which of a checkpoint's tensors a resume rounds: torch casts them to the live dtypes.

``Optimizer.load_state_dict`` casts each state to its parameter's dtype. torch's distributed
checkpoint, with which most frameworks load, has copied the tensors before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from typing import Any

from ..errors import CheckpointLayoutError
from ..precision.continuing import rounded
from ..process.wrapping import Wrapping
from ..reporting import journal as _journal
from . import latest

_STATE = re.compile(r"(?:^|\.)state\.(?:.+\.)?(\w+)$")
"""Matches an optimizer's state in torch's flat keys, such as ``optimizer.state.w.exp_avg``."""


class PlannedLoads:
    """Judges each load of torch's distributed checkpoint, before it reads a tensor.

    A framework's planner, such as Megatron's, is left to the framework's adapter.
    """

    def __init__(self, awake: Collection[str], strict: bool) -> None:
        self._awake = awake
        self._strict = strict
        place = "torch.distributed.checkpoint.default_planner:DefaultLoadPlanner.create_local_plan"
        self._wrapping = Wrapping([place], self._wrapper)
        self.enter, self.leave = self._wrapping.enter, self._wrapping.leave

    def _wrapper(self, _: str, original: Any) -> Callable[..., Any]:
        def plan(planner: Any) -> Any:
            if self._wrapping.on and self._awake and type(planner).__name__ == "DefaultLoadPlanner":
                tell(_of_plan(planner), [*self._awake], "", latest.fp32_keys(), self._strict)
            return original(planner)

        return plan


def _of_plan(planner: Any) -> Iterator[tuple[str, str, str]]:
    """Yield name, stored and live dtype of each tensor that one of torch's planners loads."""
    from ..precision.dtypes import name_of

    stored = planner.metadata.state_dict_metadata
    states = {key: match[1] for key in stored if (match := _STATE.search(key))}
    for key, live in planner.state_dict.items() if states else ():  # else a model to begin with
        there = getattr(stored.get(key), "properties", None)
        if there is not None and hasattr(live, "dtype"):
            yield states.get(key, "weights"), name_of(there.dtype), name_of(live.dtype)


def of_states(optimizer: Any, state_dict: Any) -> Iterator[tuple[str, str, str]]:
    """Yield name, stored and live dtype of each state that a torch optimizer loads."""
    from ..precision.dtypes import name_of

    numbers, parameters = (
        chain.from_iterable(group["params"] for group in groups)
        for groups in (state_dict["param_groups"], optimizer.param_groups)
    )
    for number, parameter in zip(numbers, parameters, strict=False):
        for name, value in state_dict["state"].get(number, {}).items():
            if name != "step" and hasattr(value, "dtype"):
                yield name, name_of(value.dtype), name_of(parameter.dtype)


def tell(
    tensors: Iterable[tuple[str, str, str]],
    frameworks: Iterable[str],
    subject: str,
    fp32_keys: Iterable[str],
    strict: bool,
) -> None:
    """Warn that a load rounds tensors, if it does; for ``tensors`` see ``continuing.rounded``.

    Raises:
        CheckpointLayoutError: instead of the warning, if ``strict``.
    """
    from .audits import where_of

    where = " and ".join(where_of(one, "") for one in frameworks)
    keys = " and ".join(filter(None, dict.fromkeys(fp32_keys)))
    remedy = f"Set the parameters' dtype to fp32{keys and f' ({keys})'} to go on exactly"
    try:
        found = rounded(tensors, where, subject, remedy)
    except Exception as error:  # a state dict of another form must not fail the load
        _journal.log(f"{where}: whether a load rounds is not known: {error!r}")
        return
    for problem in found.problems:
        if strict:
            raise CheckpointLayoutError(
                f"{problem}, or take this check away with PRECISION_SHIM_FEATURES=-audit."
            )
        _journal.warn(f"{problem}.", stacklevel=None)
