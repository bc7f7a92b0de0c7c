"""The weights that a trainer sends to its rollout, and what contradicts in them. Needs no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..files.writing import write_whole
from ..precision.names import ALIASES
from .files import read_files
from .ranks import grouped, numbers

SUFFIX = ".rollout.json"
BASE, ADAPTERS, BIASES = "weights", "adapters", "router biases"
"""The groups of tensors: LoRA's adapters, the biases with which a router chooses, the rest."""


@dataclass(frozen=True)
class Weights:
    """Dtypes of a group of tensors, and what a sample of their elements says.

    Attributes:
        dtypes: maps each dtype's name (canonical, or else torch's) to a number of elements.
        exact: whether bf16 represents each sampled element exactly; ``None`` without a sample. Not
            counted: fp16's subnormal numbers, most of which bf16 represents exactly.
    """

    dtypes: Mapping[str, int] = field(default_factory=dict)
    exact: bool | None = None

    @property
    def mostly_bf16(self) -> bool:
        """Whether more than half of the elements are in bf16."""
        return 2 * self.dtypes.get("bf16", 0) > sum(self.dtypes.values())

    def __str__(self) -> str:
        return "+".join(sorted(self.dtypes)) + (" (no more than bf16's bits)" if self.exact else "")


@dataclass(frozen=True)
class Sent:
    """The weights that a trainer's process sent to the rollout.

    Attributes:
        framework: the framework's name.
        subject: name of the trained policy, such as ``"actor"``.
        rank: rank of the process.
        asked: the config's dtype name for the rollout; empty if it is not known.
        key: the config key of the rollout's dtype.
        sync: number of the weight sync, counted from 1.
        sent: maps ``ADAPTERS`` (LoRA weights) and ``BASE`` (others) to statistics of sent tensors.
        own: like ``sent``, for the trainer's parameters; empty if they are not known.
        then: the dtype to which the framework rounds the tensors after the audit, or empty.
        quantised: number of layers that were sent in 8 bits.
        head: empty, or ``"fp32"`` if the shim made the trainer compute its LM head in fp32.
        computes: the trainer's compute dtype, ``"fp16"`` or ``"bf16"``; empty if it is not known.
    """

    framework: str
    subject: str
    rank: int
    asked: str
    key: str
    sync: int
    sent: Mapping[str, Weights]
    own: Mapping[str, Weights]
    then: str = ""
    quantised: int = 0
    head: str = ""
    computes: str = ""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Sent:
        """Make a ``Sent`` from the values in a JSON file."""
        sent, own = (
            {name: Weights(**weights) for name, weights in values[side].items()}
            for side in ("sent", "own")
        )
        return cls(**{**values, "sent": sent, "own": own})

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """Yield a code (docs/audit.md) and a message for each contradiction with the dtype."""
        biases, kept = self.sent.get(BIASES, Weights()), self.own.get(BIASES, Weights())
        dtypes = {self.then} if self.then else {*biases.dtypes}
        if {*kept.dtypes} == {"fp32"} and dtypes & {"fp16", "bf16"}:
            yield (
                "weights-dtype",
                f"{BIASES} go out in {'+'.join(sorted(dtypes))}, and the trainer keeps them in "
                "fp32: each sync rounds them, so the rollout may choose other experts. Let the "
                "framework send them in fp32.",
            )
        rollout = ALIASES.get(self.asked)  # "auto" and NeMo-RL's "fp8" are not canonical names
        if rollout == "bf16" and self.computes == "fp16" and not self.quantised:
            key = f" ({self.key}=float16)" if self.key else ""
            yield (
                "rollout-dtype",
                f"the {self.subject} computes in fp16, and the rollout in bf16, so the two round "
                "differently, and the mismatch that fp16 removes stays. Let the rollout compute in "
                f"fp16{key}, or train in bf16.",
            )
        if rollout not in ("fp16", "fp32"):
            return
        for group, weights in self.sent.items():
            own = self.own.get(group)
            if own is None or group == BIASES:
                continue
            in_bf16 = self.then == "bf16" if self.then else weights.mostly_bf16
            if in_bf16 and not own.mostly_bf16:
                by = " by the framework's sender" if self.then else ""
                yield (
                    "weights-dtype",
                    f"{group} go out in bf16{by}, the engine computes in {rollout}, and the "
                    f"trainer keeps them in {own}: each sync rounds them to bf16. Let the "
                    f"framework send {rollout}, or let the rollout compute in bf16.",
                )
            elif weights.exact and own.exact is False and not self.quantised:
                yield (
                    "bf16-wire",
                    f"bf16 represents all {group} that were sent exactly, but not the trainer's "
                    f"own, and the engine computes in {rollout}: something rounds them to bf16 "
                    "before they are sent, which no dtype shows. Look for a cast in the "
                    "framework's weight sync.",
                )

    def __str__(self) -> str:
        asked = f"{self.asked} asked ({self.key})" if self.asked else "dtype asked not known"
        words = [f"{self.subject}, sync {self.sync}", asked]
        then = f", then rounded to {self.then}" if self.then else ""
        for group, weights in self.sent.items():
            own = f", of the trainer's {self.own[group]}" if group in self.own else ""
            words.append(f"{group} in {weights}{then}{own}")
        if self.quantised:
            words.append(f"{self.quantised} layers in 8 bits")
        if self.head:
            words.append(f"head computes in {self.head}")
        return "; ".join(words)


@dataclass(frozen=True)
class WeightAudit:
    """The weights that the ranks of one framework's trainer sent."""

    framework: str
    sent: tuple[Sent, ...]

    @property
    def contradictions(self) -> dict[tuple[str, str], list[int]]:
        """Map each contradiction (code and message) to the ranks that have it."""
        return grouped((one, each.rank) for each in self.sent for one in each.contradictions())

    @property
    def ok(self) -> bool:
        """Whether there is no contradiction."""
        return not self.contradictions

    def lines(self) -> list[str]:
        """Return the records and contradictions as lines of text."""
        lines = [f"{self.framework}, weights to the rollout"]
        texts = grouped((str(record), record.rank) for record in self.sent)
        lines += [f"  sent, {numbers(ranks)}: {text}" for text, ranks in texts.items()]
        lines += [
            f"  contradiction, {numbers(ranks)}: {code}: {message}"
            for (code, message), ranks in self.contradictions.items()
        ]
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return a summary in a form for JSON."""
        return {
            "framework": self.framework,
            "ok": self.ok,
            "sent": {record.rank: str(record) for record in self.sent},
            "contradictions": [
                {"code": code, "message": message, "ranks": ranks}
                for (code, message), ranks in self.contradictions.items()
            ],
        }


def by_framework(records: Iterable[Sent]) -> list[WeightAudit]:
    """Group the records by their framework, in order of the ranks."""
    groups: dict[str, list[Sent]] = {}
    for record in sorted(records, key=lambda record: (record.framework, record.rank)):
        groups.setdefault(record.framework, []).append(record)
    return [WeightAudit(framework, tuple(several)) for framework, several in groups.items()]


def write(directory: str, sent: Sent) -> None:
    """Write a record into a file; the file is replaced atomically.

    Raises:
        OSError: the file cannot be written.
    """
    stem = re.sub(r"[^\w.+-]+", "-", f"{sent.framework}.{sent.subject}.sent.rank{sent.rank}")
    write_whole(Path(directory) / f"{stem}{SUFFIX}", json.dumps(asdict(sent), indent=1) + "\n")


def read(directory: str) -> Iterator[tuple[Path, Sent | str]]:
    """Read the records in a directory; see ``read_files``."""
    return read_files(directory, SUFFIX, Sent.of)
