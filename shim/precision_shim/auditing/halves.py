"""Records of the weights that a trainer sends to a rollout, and of the rollout engines' weights.

``Sent`` describes the weights that a trainer's process sent to the rollout. ``Held`` describes the
dtypes and weights that a rollout engine reports. ``sending`` makes a ``Sent`` from a stream of
weights, and the adapters' package ``rollout`` makes a ``Held``. ``contradictions`` compares both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .files import read_files, refuse_newer, write_whole

SUFFIX = ".rollout.json"
BASE, ADAPTERS = "weights", "adapters"
"""The two groups of tensors: LoRA's adapters, and all other weights."""

ROLLOUT = "rollout"
"""The audit's subject for engines that generate with the trained policy. For an engine of another
model, such as a teacher, the subject is that model's name."""


@dataclass(frozen=True)
class Weights:
    """Statistics of a group of tensors.

    Attributes:
        dtypes: maps each dtype's name (canonical, or else torch's) to a number of elements.
        exact: share of the sampled elements that bf16 represents exactly; ``None`` without a
            sample. Elements below fp16's smallest normal number are not counted, because bf16
            represents most of fp16's subnormal numbers exactly.
        sampled: number of sampled elements.
    """

    dtypes: Mapping[str, int] = field(default_factory=dict)
    exact: float | None = None
    sampled: int = 0

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Weights:
        """Make a ``Weights`` from the result of ``dataclasses.asdict``."""
        exact = None if values["exact"] is None else float(values["exact"])
        if exact is not None and not 0 <= exact <= 1:  # also refuses NaN
            raise ValueError(f"exact is {exact}, expected a share from 0 to 1")
        return cls(
            {str(name): int(count) for name, count in values["dtypes"].items()},
            exact,
            int(values["sampled"]),
        )


@dataclass(frozen=True)
class Sent:
    """The weights that a trainer's process sent to the rollout.

    Attributes:
        framework: the framework's name.
        subject: name of the trained policy, such as ``"actor"``.
        rank: rank of the process.
        world_size: number of ranks of the trainer.
        job: a name that all processes of a Ray job share; empty without Ray.
        asked: the config's dtype name for the rollout; empty if it is not known.
        key: the config key of the rollout's dtype.
        sync: number of the weight sync, counted from 1.
        sent: maps ``ADAPTERS`` (LoRA weights) and ``BASE`` (others) to statistics of sent tensors.
        own: like ``sent``, for the trainer's own parameters; empty if they are not known.
        then: the dtype to which the framework rounds the tensors after the audit; empty if the
            framework does not round the tensors.
        quantised: names of the layers that were sent in 8 bits.
        not_asked: why the framework's engines cannot report their weights; empty if they can.
        head: empty, or ``"fp32"`` if the shim made the trainer compute its LM head in fp32.
        computes: the trainer's compute dtype, ``"fp16"`` or ``"bf16"``; empty if it is not known.
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
    head: str = ""
    computes: str = ""

    @property
    def stem(self) -> str:
        """The beginning of the record's file name."""
        return f"{self.framework}.{self.subject}.sent.rank{self.rank}"

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Sent:
        """Make a ``Sent`` from the values in a JSON file."""
        refuse_newer(cls, values)
        groups = {
            side: {str(name): Weights.of(weights) for name, weights in values[side].items()}
            for side in ("sent", "own")
        }
        numbers = {name: int(values[name]) for name in ("rank", "world_size", "sync")}
        quantised = tuple(map(str, values["quantised"]))
        return cls(**{**values, **numbers, **groups, "quantised": quantised})


@dataclass(frozen=True)
class Held:
    """A rollout engine's report on its own dtypes and weights.

    Attributes:
        framework: the framework's name.
        subject: the model's name, such as a teacher's; ``ROLLOUT`` for the trained policy.
        name: the engine's name within the job, such as ``"replica 0"``.
        job: see ``Sent``.
        engine: the engine's name and version, such as ``"vllm 0.30.0"``.
        model: path or name of the engine's model.
        computes: canonical name of the engine's compute dtype.
        quantization: name of the engine's quantisation; empty if there is none.
        ignored: list of layers that the quantisation excludes; ``None`` if there is no list.
        kv_cache: the configured dtype of the KV cache; ``"auto"`` for the engine's default.
        head: compute dtype of the output head; empty if the engine does not report it.
        sync: number of weight syncs before the report; 0 for a report at the engine's start.
        kinds: number of elements of the engine's parameters, by kind of layer and dtype.
        kv_held: dtypes of the KV cache's tensors.
        quantised: names of the engine's quantised layers.
        plain: names of the engine's linear layers and experts that are not quantised.
        weights: statistics of the engine's unquantised parameters; ``None`` without a report.
        sample: description of the parameters that ``weights`` covers; empty if it covers all
            parameters.
        not_answered: why the engine did not report its weights; empty if it did.
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
        """The beginning of the record's file name."""
        return f"{self.framework}.{self.subject}.held.{self.name}"

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Held:
        """Make a ``Held`` from the values in a JSON file."""
        refuse_newer(cls, values)
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
                    str(kind): {str(name): int(count) for name, count in counts.items()}
                    for kind, counts in values["kinds"].items()
                },
                "ignored": None if ignored is None else tuple(map(str, ignored)),
                "weights": None if weights is None else Weights.of(weights),
            }
        )


Half = Sent | Held
_HALVES: dict[str, type[Sent] | type[Held]] = {"sent": Sent, "held": Held}


def write(directory: str, half: Half) -> None:
    """Write a ``Sent`` or a ``Held`` into a file; the file is replaced atomically.

    Raises:
        OSError: the file cannot be written.
    """
    kind = "sent" if isinstance(half, Sent) else "held"
    name = re.sub(r"[^\w.+-]+", "-", half.stem)
    text = json.dumps({"half": kind, **asdict(half)}, indent=1) + "\n"
    write_whole(Path(directory) / f"{name}{SUFFIX}", text)


def read(directory: str) -> Iterator[tuple[Path, Half | str]]:
    """Read the ``Sent`` and ``Held`` records in a directory; see ``read_files``."""
    return read_files(directory, SUFFIX, lambda values: _HALVES[values.pop("half")].of(values))
