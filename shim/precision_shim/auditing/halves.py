"""The other half of an audit, as plain data: the weights sent to the rollout, and those it holds.

``Sent`` describes the weights that a trainer's process sent to the rollout. ``Held`` describes what
an engine answered when it was asked. ``sending`` makes a ``Sent`` from a stream of weights, and the
adapters' backend ``rollout`` makes a ``Held``; ``contradictions`` compares them.
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
"""The two groups of tensors: LoRA's adapters, and all other weights."""

ROLLOUT = "rollout"
"""The subject of the engines that generate for the trained policy; engines of other models have
another subject."""


@dataclass(frozen=True)
class Weights:
    """Statistics of a group of tensors.

    Attributes:
        dtypes: number of elements by the dtype's canonical name, or torch's name for other dtypes.
        exact: share of the sampled elements that bf16 represents exactly; ``None`` without a
            sample. Elements below fp16's least normal number are left out: after a rounding to
            fp16, bf16 represents most of these exactly.
        sampled: number of sampled elements.
    """

    dtypes: Mapping[str, int] = field(default_factory=dict)
    exact: float | None = None
    sampled: int = 0

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Weights:
        """Make a ``Weights`` from the result of ``dataclasses.asdict``."""
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
        job: a name that all processes of the job have in common; empty where there is none.
        asked: the dtype name that the config asks the rollout for; empty where it is not known.
        key: the config key of that dtype.
        sync: number of the weight sync, from 1.
        sent: the tensors that were sent, by group.
        own: the trainer's own parameters at that sync, by group; empty where they are not known.
        then: the dtype that the framework's sender rounds the sent tensors to afterwards; empty if
            it does not.
        quantised: names of the layers that were sent in 8 bits.
        not_asked: why no engine of the framework can be asked what it holds; empty where engines
            are asked.
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
        """Make a ``Sent`` from a file's values."""
        groups = {
            side: {str(name): Weights.of(one) for name, one in values[side].items()}
            for side in ("sent", "own")
        }
        numbers = {name: int(values[name]) for name in ("rank", "world_size", "sync")}
        quantised = tuple(map(str, values["quantised"]))
        return cls(**{**values, **numbers, **groups, "quantised": quantised})


@dataclass(frozen=True)
class Held:
    """What a rollout engine reports about itself.

    Attributes:
        framework: the framework's name.
        subject: ``ROLLOUT``, or the other model that the engine runs, such as a teacher.
        name: which of the job's engines this is, such as ``"replica 0"``.
        job: see ``Sent``.
        engine: the engine's name and version, such as ``"vllm 0.30.0"``.
        model: the model's path or name that the engine was given.
        computes: canonical name of the dtype that the engine computes in.
        quantization: name of the engine's quantisation; empty if there is none.
        ignored: the layers that the quantisation's config leaves out; ``None`` where the config
            does not say.
        kv_cache: the dtype that the KV cache was asked for; ``"auto"`` for the engine's default.
        head: the dtype in which the output head computes; empty where the engine does not say.
        sync: number of weight syncs before the engine was asked; 0 if it was asked at its start.
        kinds: number of elements of the engine's parameters, by kind of layer and dtype.
        kv_held: dtypes of the KV cache's tensors.
        quantised: names of the engine's quantised layers.
        plain: names of the engine's linear layers and experts that are not quantised.
        weights: the engine's parameters that are not quantised; ``None`` where it did not answer.
        sample: which of these parameters ``weights`` is of; empty if it is of all.
        not_answered: why the engine did not answer; empty if it did.
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
    sample: str = ""
    not_answered: str = ""

    @property
    def stem(self) -> str:
        """The beginning of the file's name."""
        return f"{self.framework}.{self.subject}.held.{self.name}"

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Held:
        """Make a ``Held`` from a file's values."""
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
    """Write a half into a file; the file is replaced atomically.

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
