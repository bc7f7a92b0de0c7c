"""Replace every spelling of a training dtype by torchtitan's name before torchtitan reads it.

torchtitan compares dtype names as strings, and looks them up in a dict of three names. The shim
replaces a name when torchtitan builds a config, and again when a trainer receives the config.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import torch

from precision_shim.adapting import Call, seam, versioned
from precision_shim.errors import DtypeError
from precision_shim.precision.dtypes import parse_dtype
from precision_shim.precision.effect import COMPUTES, REDUCES, Written

from .training.trainers import NAMES, OWN_NAMES, POLICY, RL, TRAINER, refuse_float16_states

FEATURE = "dtype-coercion"
KEYS = ("dtype", "mixed_precision_param")
"""The keys of ``TrainingConfig`` whose dtype names the shim coerces."""

SETS = {"dtype": "params", "mixed_precision_param": COMPUTES, "mixed_precision_reduce": REDUCES}
"""Maps a dtype key of ``TrainingConfig`` to what it sets."""

_SPELLINGS = "float16/fp16/half/16, bfloat16/bf16, float32/fp32/float/32"
_COERCES: dict[str, Any] = {
    "feature": FEATURE,
    "upstream": "https://github.com/pytorch/torchtitan/issues/2356",
    "delete_when": "torchtitan accepts aliases of dtype names",
}


def own_name(value: Any, key: str) -> Any:
    """Torchtitan's own name for a dtype name or a ``torch.dtype``; other values are unchanged.

    Raises:
        DtypeError: torchtitan does not compute in this dtype, or the name is unknown.
    """
    if not isinstance(value, str | torch.dtype):
        return value
    dtype = parse_dtype(value) if isinstance(value, str) else value
    name = OWN_NAMES.get(dtype)
    if name is None:
        raise DtypeError(
            f"{versioned('torchtitan')}: {key}={value!r} names no dtype that torchtitan computes "
            f"in; allowed: {_SPELLINGS}, in any case, also with the prefix 'torch.'. Correct {key}."
        )
    return name


def coerce_training(training: Any) -> None:
    """Replace the dtype names in a ``TrainingConfig`` by torchtitan's own names.

    Raises:
        DtypeError: a name is unknown, or ``training.dtype`` is float16.
    """
    for key in KEYS:
        setattr(training, key, own_name(getattr(training, key), f"training.{key}"))
    refuse_float16_states(training)


def written(training: Any, prefix: str) -> tuple[Written, ...]:
    """The dtype keys of a ``TrainingConfig``; ``prefix`` is what stands before ``training.``."""
    return tuple(
        Written(f"{prefix}training.{key}", getattr(training, key), sets)
        for key, sets in SETS.items()
    )


@seam(
    "torchtitan.config.configs:TrainingConfig.__init__",
    group=NAMES,
    why="before any comparison: RL's controller compares names while its config is built",
    **_COERCES,
)
def build_training(call: Call, dtype: Any, mixed_precision_param: Any) -> None:
    """Build a ``TrainingConfig`` with torchtitan's own dtype names."""
    call.proceed()
    coerce_training(call.instance)


@seam(
    "torchtitan.config.manager:ConfigManager.parse_args",
    group=NAMES,
    why="the command line knows only the values that stand in TrainingConfig's annotations",
    relies_on=("tyro", "cli"),
    **_COERCES,
)
def parse_args(call: Call) -> Any:
    """Make the command line accept every spelling of a dtype, without a new option."""
    with any_name():
        return call.proceed()


@contextmanager
def any_name() -> Iterator[None]:
    """Make tyro accept any string for a dtype; ``build_training`` checks the name later.

    tyro reads ``TrainingConfig.__annotations__``, not the types in the dataclass's fields.
    """
    import tyro
    from torchtitan.config.configs import TrainingConfig

    metavar = "{" + ",".join(OWN_NAMES.values()) + "}"
    word = Annotated[str, tyro.conf.arg(metavar=metavar)]
    annotations = TrainingConfig.__annotations__
    before = {key: annotations[key] for key in KEYS}
    annotations.update(dict.fromkeys(KEYS, word))
    try:
        yield
    finally:
        annotations.update(before)


@seam(
    at=[
        {
            "target": f"{POLICY}.__init__",
            "group": RL,
            "why": "the trainer looks names up in a dict that knows three",
            "optional": True,
        },
        {
            "target": f"{TRAINER}.__init__",
            "group": NAMES,
            "why": "a name that was assigned after the config was built",
        },
    ],
    **_COERCES,
)
def build_trainer(call: Call, config: Any) -> Any:
    """Replace the dtype names in a trainer's config by torchtitan's own names."""
    coerce_training(config.training)
    return call.proceed()
