"""Whether an optimizer continues from a checkpoint's states exactly. Needs no torch.

It has two callers: the seams compare a checkpoint's tensors with the live optimizer's while the
checkpoint is loaded, and the checkpoint doctor reads the files before that. dtypes have this
project's names (``precision.names``).
"""

from __future__ import annotations

from collections.abc import Callable

REMAINDERS = "int16"
"""The dtype of remainders."""

NARROWER = ("bf16",)
"""dtypes that keep fp32 moments without a scale, and round those values that do not fit."""


def how_read(stored: str, wanted: str, *, master: bool) -> str:
    """How a load brings a tensor of a stored dtype to the live optimizer's dtype.

    Args:
        stored: the tensor's dtype in the checkpoint.
        wanted: the live optimizer's dtype.
        master: whether the checkpoint has the tensor for master weights.

    Returns:
        ``"as it is"``; ``"as remainders"``: together with the parameters it gives the masters;
        ``"cast"``: torch would cast the tensor silently.
    """
    if stored == wanted:
        return "as it is"
    return "as remainders" if stored == REMAINDERS and master else "cast"


def master_is_lost(
    stored: str, as_numbers: Callable[[], bool], *, precision_aware: bool, params: str
) -> bool:
    """Whether a checkpoint's tensor for master weights may fail to restore them exactly.

    Args:
        stored: the tensor's dtype.
        as_numbers: returns whether the values look like remainders that were cast to numbers;
            called only where the dtype does not tell.
        precision_aware: whether the live optimizer is precision-aware.
        params: the live parameters' dtype.
    """
    if stored == REMAINDERS:
        return params != "bf16" and not precision_aware
    return as_numbers()


def moment_becomes(live: str, fits: Callable[[], bool]) -> str:
    """How the live optimizer keeps a moment (``exp_avg``, ``exp_avg_sq``) from a checkpoint's fp32.

    Args:
        live: the dtype of the moment in the live optimizer.
        fits: returns whether that dtype holds every value in the checkpoint exactly; called only
            where it may not.

    Returns:
        ``"exact"``, ``"rounded"``, or ``"scaled"``: kept with a scale that is computed anew.
    """
    if live == "fp32":
        return "exact"
    if live in NARROWER:
        return "exact" if fits() else "rounded"
    return "scaled"
