"""The parts of the proof, the most important first."""

from __future__ import annotations

from dataclasses import asdict, dataclass

EVERYTHING_HELD, SOMETHING_FAILED, NO_GPU, SOMETHING_NOT_RUN = 0, 1, 2, 3
"""Exit statuses."""


@dataclass(frozen=True)
class Part:
    """One part of the proof.

    Attributes:
        number: position in the order, from 1.
        name: the name for ``--parts``.
        title: the heading in docs/proof.md.
        module: name of the module whose ``run(bench)`` runs the part.
        least_s: on a GPU, the part starts only if this many seconds are left; a guess.
        least_dry_s: in a dry run, the part starts only if this many seconds are left.
        repeatable: whether the part needs deterministic kernels.
    """

    number: int
    name: str
    title: str
    module: str
    least_s: float
    least_dry_s: float = 3.0
    repeatable: bool = False

    def too_late(self, left_s: float, dry: bool) -> str:
        """The reason why the part does not start with this time left; empty if it starts."""
        least = self.least_dry_s if dry else self.least_s
        if left_s >= least:
            return ""
        return f"wants at least {least:.0f} s, {max(left_s, 0.0):.0f} s were left of --minutes"

    def to_dict(self) -> dict[str, object]:
        """The part's fields, for the worker's arguments."""
        return asdict(self)


def _part(number: int, name: str, title: str, least_s: float, repeatable: bool = False) -> Part:
    module = f"benchmarks.gpu.parts.{name.replace('-', '_')}"
    return Part(number, name, title, module, least_s, repeatable=repeatable)


PARTS = (
    _part(1, "memory", "Memory: bytes per parameter, resident and peak", 60),
    _part(2, "step-time", "Time of the optimizer's step", 45),
    _part(3, "parity", "Loss on real text, with the shim and without", 60),
    _part(
        4, "fp16", "fp16: overflows, exact resume, how often the host waits", 40, repeatable=True
    ),
    _part(
        5,
        "checkpoints",
        "Checkpoints saved with the shim on or off, loaded with it on or off",
        40,
        repeatable=True,
    ),
    _part(6, "stand-in", "The stand-in against TransformerEngine's FusedAdam", 30),
    _part(7, "audit-cost", "Time that the audit adds to a real step", 30),
    _part(8, "why-fp16", "Why fp16: one model in several batch layouts", 40),
)
"""All parts of the proof."""


def named(names: str | None) -> tuple[Part, ...]:
    """Return the parts in a comma-separated list of names or numbers; all parts for ``None``.

    Raises:
        ValueError: the list is empty, or no part has one of its names or numbers.
    """
    if names is None:
        return PARTS
    wanted = {one.strip() for one in names.split(",") if one.strip()}
    known = {key: part for part in PARTS for key in (part.name, str(part.number))}
    unknown = sorted(wanted - set(known))
    if unknown or not wanted:
        raise ValueError(
            f"--parts {names}: no part {', '.join(unknown) or 'named'}; "
            f"allowed: {', '.join(part.name for part in PARTS)}, or their numbers"
        )
    chosen = {known[one] for one in wanted}
    return tuple(part for part in PARTS if part in chosen)
