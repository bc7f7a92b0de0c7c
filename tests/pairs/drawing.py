"""Pairs of jobs, drawn at random; the second job resumes from the first job's checkpoint.

Only a seed and a number determine a pair, through ``random.Random.random``. So a pair is equal on
every machine and every version of Python. A failed test prints the pair as one line of text, which
``--pair`` accepts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

SHARDINGS = ("dp_reshardable", "fully_reshardable", "dp_zero_gather_scatter")
OFF = "off"


@dataclass(frozen=True)
class Job:
    """The choices of one process's user; an empty value means that the user left the key out.

    Attributes:
        shim: ``on``, ``off``, or the features that are on, joined by ``+``.
        dtype: the model's dtype: ``bf16``, ``fp16``, ``fp32``; on Megatron also ``mixed``, which is
            bf16 with fp32 norms, and ``mixed-biases``, which is ``mixed`` with biases; on FSDP also
            ``bf16-stored``, which stores its parameters in bf16.
        policy: ``PRECISION_SHIM_OPTIMIZER_STATES``.
        init: ``PRECISION_SHIM_LOSS_SCALE_INIT``.
        interval: ``PRECISION_SHIM_GROWTH_INTERVAL``.
        offload: whether the optimizer is on the CPU, ``yes`` or empty.
        aware: ``use_precision_aware_optimizer``, ``yes`` or ``no``.
        avg: ``exp_avg_dtype``.
        avg_sq: ``exp_avg_sq_dtype``.
        grads: ``main_grads_dtype``.
        masters: ``main_params_dtype``.
        remainders: ``store_param_remainders``, ``yes`` or ``no``.
        bucket: ``grad_reduce_in_fp32``, ``yes`` or ``no``.
        beta2: ``adam_beta2``.
        copied: how the OptimizerConfig is copied before the optimizer gets it: ``replace``,
            ``pickle``, ``deepcopy``.
        seed: the random seed of the job's first weights.
    """

    shim: str = "on"
    dtype: str = "bf16"
    policy: str = ""
    init: str = ""
    interval: str = ""
    offload: str = ""
    aware: str = ""
    avg: str = ""
    avg_sq: str = ""
    grads: str = ""
    masters: str = ""
    remainders: str = ""
    bucket: str = ""
    beta2: str = ""
    copied: str = ""
    seed: str = "0"

    def has(self, feature: str) -> bool:
        """Whether the shim's feature is on."""
        return self.shim == "on" or feature in self.shim.split("+")

    def __str__(self) -> str:
        return _text(self)


@dataclass(frozen=True)
class Pair:
    """Jobs that save into one directory one after the other, and a last job that resumes from it.

    Attributes:
        backend: ``fsdp`` or ``megatron``.
        ranks: number of processes.
        engine: TransformerEngine's version, ``none`` for a machine without it; Megatron only.
        sharding: Megatron's sharding type; empty on FSDP.
        stop: steps that each saving job takes before it saves.
        more: steps that are taken after the save.
        overflows: steps at which gradients overflow, joined by ``+``.
        jobs: the saving jobs in order, and the resuming job.
    """

    backend: str = "fsdp"
    ranks: int = 1
    engine: str = "2.11.0"
    sharding: str = ""
    stop: int = 3
    more: int = 3
    overflows: str = ""
    jobs: tuple[Job, ...] = field(default=())

    @property
    def overflowing(self) -> tuple[int, ...]:
        """``overflows`` as numbers."""
        return tuple(int(one) for one in self.overflows.split("+") if one)

    @property
    def saving(self) -> tuple[Job, ...]:
        """The jobs that save."""
        return self.jobs[:-1]

    def unpatched(self) -> Pair:
        """The same jobs with the shim off."""
        return replace(self, jobs=tuple(replace(one, shim=OFF) for one in self.jobs))

    def __str__(self) -> str:
        return " | ".join([_text(self), *(str(one) for one in self.jobs)])


def _text(one: Job | Pair) -> str:
    """The fields that differ from their defaults, as ``name=value``."""
    words = [
        f"{each.name}={getattr(one, each.name)}"
        for each in fields(one)
        if each.name != "jobs" and getattr(one, each.name) != each.default
    ]
    return " ".join(words) or "-"


def parse(text: str) -> Pair:
    """The pair with this text."""
    first, *jobs = (part.split() for part in text.split("|"))
    values = dict(word.split("=", 1) for word in first if word != "-")
    whole = {each.name for each in fields(Pair) if each.type == "int"}
    return Pair(
        **{name: int(value) if name in whole else value for name, value in values.items()},
        jobs=tuple(
            Job(**dict(word.split("=", 1) for word in words if word != "-")) for words in jobs
        ),
    )


# -- drawing -----------------------------------------------------------------------------------


class _Hand:
    """Draws with ``random()`` alone, whose values are the same in every version of Python."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed).random

    def chance(self, share: float) -> bool:
        return self._random() < share

    def of(self, *values: str) -> str:
        return values[int(self._random() * len(values))]

    def number(self, low: int, high: int) -> int:
        return low + int(self._random() * (high - low + 1))


def draw(seed: int, number: int, *, backends: Sequence[str] = ("fsdp", "megatron")) -> Pair:
    """The pair with this seed and number."""
    hand = _Hand(f"{seed}:{number}:{'+'.join(backends)}")
    backend = hand.of(*backends)
    stop = hand.number(1, 4)
    overflows = [step for step in (stop - 1, stop, stop + 1) if hand.chance(0.4)]
    pair = Pair(
        backend=backend,
        ranks=2 if hand.chance(0.3) else 1,
        stop=stop,
        overflows="+".join(map(str, overflows)),
    )
    return (_fsdp if backend == "fsdp" else _megatron)(hand, pair)


def _shim(hand: _Hand) -> str:
    if hand.chance(0.6):
        return "on"
    if hand.chance(0.65):
        return OFF
    return hand.of(
        "dtype-coercion+bf16-dispatch+grad-bucket-alignment",
        "fp16-scaling",
        "dtype-coercion+fp16-scaling",
        "bf16-dispatch+fp16-scaling",
        "bf16-dispatch+grad-bucket-alignment",
        "grad-bucket-alignment+fp16-scaling",
    )


def _other_settings(hand: _Hand, one: Job, scales: Sequence[str], intervals: Sequence[str]) -> Job:
    """The same job with the scaler's settings kept, left out, or changed."""
    if hand.chance(0.6):
        return one
    if hand.chance(0.5):
        return replace(one, init="", interval="")
    return replace(one, init=hand.of(*scales), interval=hand.of(*intervals))


def _fsdp(hand: _Hand, pair: Pair) -> Pair:
    scales = ("", "0.25", "2", "1024", "1048576")
    intervals = ("", "2", "3")
    dtypes = ("fp16", "fp16", "fp16", "fp16", "bf16", "fp32", "bf16-stored")
    first = Job(
        shim=_shim(hand),
        dtype=hand.of(*dtypes),
        init=hand.of(*scales),
        interval=hand.of(*intervals),
        offload="yes" if hand.chance(0.1) else "",
    )
    jobs = [first]
    if hand.chance(0.35):
        again = _other_settings(hand, replace(first, shim=_shim(hand)), scales, intervals)
        if hand.chance(0.3):
            again = replace(again, dtype=hand.of("fp16", "bf16", "fp32"))
        jobs.append(again)
    last = _other_settings(hand, replace(first, shim=_shim(hand)), scales, intervals)
    if hand.chance(0.15):
        last = replace(last, dtype=hand.of("fp16", "bf16", "fp32"))
    jobs.append(last)
    return _seeded(pair, jobs)


def _megatron(hand: _Hand, pair: Pair) -> Pair:
    pair = replace(
        pair, sharding=hand.of(*SHARDINGS), engine="none" if hand.chance(0.12) else Pair.engine
    )
    scales, intervals = ("", "1024", "16384"), ("", "2", "3")
    first = Job(
        shim=_shim(hand),
        dtype=hand.of("bf16", "bf16", "bf16", "fp16", "fp16", "fp32", "mixed", "mixed-biases"),
        policy=hand.of("", "", "follow-model", "as-configured"),
        init=hand.of(*scales),
        interval=hand.of(*intervals),
        offload="yes" if hand.chance(0.06) else "",
        beta2=hand.of("", "0.95"),
        bucket=hand.of("", "", "", "yes", "no"),
        copied=hand.of("", "", "", "replace", "pickle", "deepcopy"),
    )
    first = _states(hand, first) if hand.chance(0.45) else first
    if first.offload:  # Megatron cannot offload its other optimizers with fp32 masters
        first = replace(first, aware="yes", dtype="bf16")
    jobs = [first]
    if hand.chance(0.2):
        jobs.append(_other_settings(hand, replace(first, shim=_shim(hand)), scales, intervals))
    last = _other_settings(hand, replace(first, shim=_shim(hand)), scales, intervals)
    if hand.chance(0.2):
        last = replace(last, policy=hand.of("", "follow-model", "as-configured"))
    if hand.chance(0.15):
        last = _states(hand, last)
    jobs.append(last)
    return _seeded(pair, jobs)


def _states(hand: _Hand, one: Job) -> Job:
    """The same job with optimizer states that the user's own config names."""
    one = replace(one, aware=hand.of("yes", "yes", "yes", "yes", "no"))
    if one.aware == "no":
        return one
    remainders = hand.of("", "", "yes", "no")
    if one.dtype in ("fp16", "fp32"):
        remainders = hand.of("", "no")
    return replace(
        one,
        avg=hand.of("", "", "fp32", "bf16", "fp16"),
        avg_sq=hand.of("", "", "fp32", "bf16", "fp16"),
        grads=hand.of("", "", "fp32", "bf16" if one.dtype != "fp16" else "fp32"),
        masters=hand.of("", "", "", "fp32", "fp16"),
        remainders=remainders,
    )


def _seeded(pair: Pair, jobs: Sequence[Job]) -> Pair:
    """Each job starts with its own weights, so that a state that was not resumed is noticed."""
    return replace(pair, jobs=tuple(replace(one, seed=str(i)) for i, one in enumerate(jobs)))
