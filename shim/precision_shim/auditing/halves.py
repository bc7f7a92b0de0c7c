"""The rollout's half of an audit, as plain data: the weights that were sent, and an engine's own.

``Sent`` is what a trainer's process saw of the weights on their way to the rollout. ``Held`` is
what an engine answered when it was asked. ``sending`` makes the first from a stream of weights; the
backend ``rollout`` among the adapters makes the second; ``contradictions`` compares them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .files import read_files, write_whole

SUFFIX = ".rollout.json"
BASE, ADAPTERS = "weights", "adapters"
"""The two groups of tensors: LoRA's adapters are one of their own."""

ROLLOUT = "rollout"
"""The subject of the engines that generate for the trained policy; others are another model's."""


@dataclass(frozen=True)
class Weights:
    """A group of tensors.

    Attributes:
        dtypes: number of elements by dtype, by canonical names; torch's names for other dtypes.
        exact: share of the sampled elements that bf16 represents exactly; ``None`` without a
            sample. Elements below fp16's least normal number are left out: bf16 represents most
            of what fp16 makes of these.
        sampled: number of the sampled elements.
    """

    dtypes: Mapping[str, int] = field(default_factory=dict)
    exact: float | None = None
    sampled: int = 0

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Weights:
        """Make one from the result of ``dataclasses.asdict``."""
        exact = values["exact"]
        return cls(
            {str(name): int(count) for name, count in values["dtypes"].items()},
            None if exact is None else float(exact),
            int(values["sampled"]),
        )


@dataclass(frozen=True)
class Sent:
    """The weights that a trainer's process sent to the rollout.

    Attributes:
        framework: the framework's name.
        subject: the trained policy, such as ``"actor"``.
        rank: rank of the process.
        world_size: number of ranks of the trainer.
        job: what all processes of one job have in common; empty where nothing tells.
        asked: the dtype name that the rollout's key has; empty where it is not known.
        key: the key.
        sync: number of the weight sync, from 1.
        sent: the tensors that were sent, by group.
        own: the trainer's own parameters at that sync, by group; empty where they are not known.
        then: the dtype that the framework's sender rounds them to afterwards; empty for none.
        quantised: names of the layers that were sent in 8 bits.
        not_asked: why no engine of the framework can be asked; empty where engines are asked.
    """

    framework: str
    subject: str
    rank: int
    world_size: int
    job: str
    asked: str
    key: str
    sync: int
    sent: Mapping[str, Weights]
    own: Mapping[str, Weights]
    then: str = ""
    quantised: tuple[str, ...] = ()
    not_asked: str = ""

    @property
    def stem(self) -> str:
        """The beginning of the file's name."""
        return f"{self.framework}.{self.subject}.sent.rank{self.rank}"

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Sent:
        """Make one from a file's values."""
        groups = {
            side: {str(name): Weights.of(one) for name, one in values[side].items()}
            for side in ("sent", "own")
        }
        numbers = {name: int(values[name]) for name in ("rank", "world_size", "sync")}
        quantised = tuple(map(str, values["quantised"]))
        return cls(**{**values, **numbers, **groups, "quantised": quantised})


@dataclass(frozen=True)
class Held:
    """What a rollout engine says of itself.

    Attributes:
        framework: the framework's name.
        subject: ``ROLLOUT``, or whose engine it is: a teacher's, a reward model's.
        name: which of the job's engines, such as ``"replica 0"``.
        job: as in ``Sent``.
        engine: name and version, such as ``"vllm 0.30.0"``.
        model: the model's path or name, as the engine got it.
        computes: canonical name of the dtype that it computes in.
        quantization: name of its quantisation; empty for none.
        ignored: the layers that its quantisation leaves out, by its config; ``None`` where the
            config does not say.
        kv_cache: the dtype that was asked for the KV cache; ``"auto"`` for the engine's own.
        head: the dtype in which the head computes; empty where the engine does not say.
        sync: number of weight syncs before it was asked; 0 for its start.
        kinds: number of elements of its parameters, by kind of layer and dtype.
        kv_held: dtypes of the KV cache's tensors.
        quantised: names of its quantised layers.
        plain: names of its linear layers and experts that are not quantised.
        weights: its parameters that are not quantised; ``None`` where it did not answer.
        not_answered: why it did not answer; empty if it did.
    """

    framework: str
    subject: str
    name: str
    job: str
    engine: str
    model: str
    computes: str
    quantization: str = ""
    ignored: tuple[str, ...] | None = None
    kv_cache: str = ""
    head: str = ""
    sync: int = 0
    kinds: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    kv_held: tuple[str, ...] = ()
    quantised: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    weights: Weights | None = None
    not_answered: str = ""

    @property
    def stem(self) -> str:
        """The beginning of the file's name."""
        return f"{self.framework}.{self.subject}.held.{self.name}"

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Held:
        """Make one from a file's values."""
        several = {
            name: tuple(map(str, values[name])) for name in ("kv_held", "quantised", "plain")
        }
        ignored, weights = values["ignored"], values["weights"]
        return cls(
            **{
                **values,
                **several,
                "sync": int(values["sync"]),
                "kinds": {
                    str(kind): {str(name): int(count) for name, count in one.items()}
                    for kind, one in values["kinds"].items()
                },
                "ignored": None if ignored is None else tuple(map(str, ignored)),
                "weights": None if weights is None else Weights.of(weights),
            }
        )


Half = Sent | Held
_HALVES: dict[str, type[Sent] | type[Held]] = {"sent": Sent, "held": Held}


def write(directory: str, half: Half) -> None:
    """Write a half into a file; a reader never sees part of it.

    Raises:
        OSError: the file cannot be written.
    """
    kind = "sent" if isinstance(half, Sent) else "held"
    name = re.sub(r"[^\w.+-]+", "-", half.stem)
    text = json.dumps({"half": kind, **asdict(half)}, indent=1) + "\n"
    write_whole(Path(directory) / f"{name}{SUFFIX}", text)


def read(directory: str) -> Iterator[tuple[Path, Half | str]]:
    """Read the halves in a directory; see ``read_files``."""
    return read_files(directory, SUFFIX, lambda values: _HALVES[values.pop("half")].of(values))
