"""Decide whether a resumed optimizer has exactly its checkpoint's states. Needs no torch.

Seams apply these rules while a checkpoint is loaded, the checkpoint doctor before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .findings import Findings, Problem

REMAINDERS = "int16"
"""The dtype of remainders, which are the low bits of fp32 masters."""

NARROWER = ("bf16",)
"""dtypes that store a moment without a scale; loading an fp32 moment may round its values."""


def how_read(stored: str, wanted: str, *, master: bool) -> str:
    """Return how loading converts a checkpoint's tensor to the live optimizer's dtype.

    ``master`` is whether the checkpoint stores the tensor as master weights.

    Returns:
        ``"as it is"``: no conversion is needed. ``"as remainders"``: the masters are rebuilt from
        the tensor and the parameters. ``"cast"``: torch would cast the tensor silently.
    """
    if stored == wanted:
        return "as it is"
    return "as remainders" if stored == REMAINDERS and master else "cast"


def master_is_lost(
    stored: str, as_numbers: Callable[[], bool], *, precision_aware: bool, params: str
) -> bool:
    """Whether master weights may be wrong or inexact after they are loaded from a checkpoint.

    Args:
        stored: dtype of the master weights in the checkpoint.
        as_numbers: function that returns whether the values look like int16 remainders (low bits)
            that were converted to floats; called only if the dtype alone does not decide.
        precision_aware: whether the live optimizer is precision-aware.
        params: the live parameters' dtype.
    """
    if stored == REMAINDERS:
        return params != "bf16" and not precision_aware
    return as_numbers()


def moment_becomes(live: str, fits: Callable[[], bool]) -> str:
    """Return how loading changes an fp32 moment of a checkpoint into the ``live`` dtype.

    ``fits`` returns whether ``live`` represents every value in the checkpoint exactly; it is called
    only for a dtype in ``NARROWER``.

    Returns:
        ``"exact"``, ``"rounded"``, or ``"scaled"`` (stored with a newly computed scale).
    """
    if live == "fp32":
        return "exact"
    if live in NARROWER:
        return "exact" if fits() else "rounded"
    return "scaled"


_BITS = {"float64": (11, 52), "fp32": (8, 23), "bf16": (8, 7), "fp16": (5, 10)}
"""Bits of exponent and of fraction, by dtype."""


def rounded(
    tensors: Iterable[tuple[str, str, str]], where: str, subject: str, remedy: str
) -> Findings:
    """Find out which of a checkpoint's tensors a load rounds, by their dtypes.

    Args:
        tensors: of each tensor its name in the message, its dtype in the checkpoint, and the live
            tensor's, to which torch casts it silently.
        where: framework and version, for the message.
        subject: the model's name.
        remedy: how to go on exactly.
    """
    found: dict[tuple[str, str], dict[str, None]] = {}
    for name, stored, live in tensors:
        if any(a > b for a, b in zip(_BITS.get(stored, ()), _BITS.get(live, ()), strict=False)):
            found.setdefault((stored, live), {})[name] = None
    if not found:
        return Findings()
    casts = (f"{' and '.join(names)} from {a} to {b}" for (a, b), names in found.items())
    named = ", ".join(filter(None, (where, subject))) or "resume"
    text = f"{named}: loading this checkpoint rounds its {', its '.join(casts)}, so that training"
    text += " is not the one that was saved"
    return Findings(problems=(Problem("rounded-resume", subject, "", text, remedy),))
