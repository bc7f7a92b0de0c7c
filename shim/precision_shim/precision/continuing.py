"""Whether an optimizer continues from a checkpoint's states exactly. Needs no torch.

Two ask: the seams while a checkpoint is loaded, about its tensors and the live optimizer's; and the
checkpoint doctor before that, about what it reads of a file. dtypes go by the names that this
project has for them.
"""

from __future__ import annotations

from collections.abc import Callable

REMAINDERS = "int16"
"""The dtype of remainders."""

NARROWER = ("bf16",)
"""dtypes of moments that hold fp32 values without a scale, some of them rounded."""


def how_read(stored: str, wanted: str, *, master: bool) -> str:
    """How a tensor of one dtype is read where another one is wanted.

    Args:
        stored: the dtype in the checkpoint.
        wanted: the live optimizer's.
        master: whether it is what the checkpoint has for the masters.

    Returns:
        ``"as it is"``; ``"as remainders"``: they can be put together with the parameters;
        ``"cast"``: torch would cast it without a word.
    """
    if stored == wanted:
        return "as it is"
    return "as remainders" if stored == REMAINDERS and master else "cast"


def master_is_lost(
    stored: str, as_numbers: Callable[[], bool], *, precision_aware: bool, params: str
) -> bool:
    """Whether what a checkpoint has for the masters cannot be turned into masters for certain.

    Args:
        stored: its dtype.
        as_numbers: whether the values look like remainders that were stored as numbers; asked only
            where the dtype does not tell.
        precision_aware: whether the live optimizer is.
        params: the live parameters' dtype.
    """
    if stored == REMAINDERS:
        return params != "bf16" and not precision_aware
    return as_numbers()


def moment_becomes(live: str, fits: Callable[[], bool]) -> str:
    """What becomes of a moment, which checkpoints hold in fp32.

    Args:
        live: the dtype that the live optimizer keeps it in.
        fits: whether every value in the checkpoint is a number of that dtype; asked only where it
            may not be.

    Returns:
        ``"exact"``, ``"rounded"``, or ``"scaled"``: kept with a scale that is computed anew.
    """
    if live == "fp32":
        return "exact"
    if live in NARROWER:
        return "exact" if fits() else "rounded"
    return "scaled"
