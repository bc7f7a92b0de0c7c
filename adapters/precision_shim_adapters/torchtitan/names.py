"""Dtype names: every spelling becomes torchtitan's own before torchtitan looks at it.

torchtitan compares names, looks them up in a dict that knows three, and hands them on to vLLM. So a
name is changed where a config is built, and once more where a trainer or a generator gets a config,
for a name that was assigned later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import torch

from precision_shim.adapting import Call, seam, versioned
from precision_shim.errors import DtypeError
from precision_shim.precision.dtypes import CANONICAL, parse_dtype
from precision_shim.precision.names import ALIASES

from .places import (
    GENERATOR,
    GENERATORS,
    NAMES,
    OWN_NAMES,
    POLICY,
    RL,
    TRAINER,
    refuse_float16_states,
)

FEATURE = "dtype-coercion"
KEYS = ("dtype", "mixed_precision_param")
"""The keys of ``TrainingConfig`` that are coerced."""

_DELETE = "torchtitan accepts aliases of dtype names"
_UPSTREAM = "https://github.com/pytorch/torchtitan/issues/2356"


def own_name(value: Any, key: str) -> Any:
    """Torchtitan's name for the dtype that a name means, or that was written as a ``torch.dtype``.

    Args:
        value: what stands in the config; anything else stays as it is.
        key: the config's key, for the message.

    Raises:
        DtypeError: it names no dtype that torchtitan has.
    """
    if not isinstance(value, str | torch.dtype):
        return value
    dtype = parse_dtype(value) if isinstance(value, str) else value
    name = OWN_NAMES.get(dtype)  # type: ignore[arg-type]
    if name is None:
        raise DtypeError(
            f"{versioned('torchtitan')}: {key}={value!r} names no dtype that torchtitan computes "
            f"in; allowed: {_allowed()}, in any case, also with the prefix 'torch.'. Correct {key}."
        )
    return name


def _allowed() -> str:
    spellings: dict[str, list[str]] = {name: [] for name in OWN_NAMES.values()}
    for name in (*CANONICAL, *ALIASES):
        own = OWN_NAMES.get(parse_dtype(name))  # type: ignore[arg-type]
        if own is not None and name != own:
            spellings[own].append(name)
    return ", ".join("/".join([own, *others]) for own, others in spellings.items())


def coerce_training(training: Any) -> None:
    """Give a ``TrainingConfig`` torchtitan's own names.

    Raises:
        DtypeError: a name is unknown, or float16 is asked for where it cannot be.
    """
    for key in KEYS:
        value = getattr(training, key)
        own = own_name(value, f"training.{key}")
        if own is not value:
            setattr(training, key, own)
    refuse_float16_states(training)


def coerce_generator(config: Any) -> None:
    """Give a generator's config torchtitan's own names; ``auto`` is vLLM's and stays.

    Raises:
        DtypeError: the name is unknown.
    """
    value = config.model_dtype
    if value == "":  # the trainer's own
        return
    automatic = isinstance(value, str) and value.strip().lower() == "auto"
    own = "auto" if automatic else own_name(value, "generator.model_dtype")
    if own is not value:
        config.model_dtype = own


def generator_dtype_name(value: Any) -> Any:
    """The name of the generator's dtype, as the trainer needs it.

    Raises:
        DtypeError: the name is unknown, or is left to vLLM.
    """
    if isinstance(value, str) and value.strip().lower() == "auto":
        raise DtypeError(
            f"{versioned('torchtitan')}: generator.model_dtype={value!r}: vLLM chooses the dtype "
            "in another process, and the trainer has to know it to send the weights in it; "
            f"allowed here: {_allowed()}. Write the dtype that vLLM is to generate in."
        )
    return value if value == "" else own_name(value, "generator.model_dtype")


# -- where a config is built -------------------------------------------------------------------


@seam(
    "torchtitan.config.configs:TrainingConfig.__init__",
    FEATURE,
    group=NAMES,
    why="before any comparison: RL's controller compares names while its config is built",
    upstream=_UPSTREAM,
    delete_when=_DELETE,
)
def build_training(call: Call, dtype: Any, mixed_precision_param: Any) -> None:
    """Build a ``TrainingConfig`` with torchtitan's own names."""
    call.proceed()
    coerce_training(call.instance)


@seam(
    f"{GENERATORS}.Config.__init__",
    FEATURE,
    group=GENERATOR,
    why="the driver's config goes on to the trainer and to vLLM",
    upstream=_UPSTREAM,
    delete_when=_DELETE,
    optional=True,
)
def build_generator_config(call: Call, model_dtype: Any) -> None:
    """Build a generator's config with torchtitan's own names."""
    call.proceed()
    coerce_generator(call.instance)


@seam(
    "torchtitan.config.manager:ConfigManager.parse_args",
    FEATURE,
    group=NAMES,
    why="the command line knows only the values that stand in TrainingConfig's annotations",
    upstream=_UPSTREAM,
    delete_when=_DELETE,
    relies_on=("tyro", "cli"),
)
def parse_args(call: Call) -> Any:
    """Let the command line take every spelling; it gets no option that it did not have."""
    with any_name():
        return call.proceed()


@contextmanager
def any_name() -> Iterator[None]:
    """While the command line is read the names of dtypes are words; building checks them.

    tyro reads the annotations of the class, not the types of its fields.
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


# -- where a trainer or a generator gets its config --------------------------------------------


@seam(
    f"{POLICY}.__init__",
    FEATURE,
    group=RL,
    why="the trainer looks names up in a dict that knows three",
    upstream=_UPSTREAM,
    delete_when=_DELETE,
    optional=True,
)
def build_policy_trainer(call: Call, config: Any, generator_dtype: Any) -> Any:
    """Bring the names of an RL trainer's config to torchtitan's own."""
    coerce_training(config.training)
    if "generator_dtype" in call.arguments:
        call.arguments["generator_dtype"] = generator_dtype_name(generator_dtype)
    return call.proceed()


@seam(
    f"{GENERATORS}.__init__",
    FEATURE,
    group=GENERATOR,
    why="a name that was assigned after the config was built, before vLLM sees it",
    upstream=_UPSTREAM,
    delete_when=_DELETE,
    optional=True,
)
def build_generator(call: Call, config: Any) -> Any:
    """Bring the name in a generator's config to torchtitan's own."""
    coerce_generator(config)
    return call.proceed()


@seam(
    f"{TRAINER}.__init__",
    FEATURE,
    group=NAMES,
    why="a name that was assigned after the config was built",
    upstream=_UPSTREAM,
    delete_when=_DELETE,
)
def build_trainer(call: Call, config: Any) -> Any:
    """Bring the names of a pre-training config to torchtitan's own."""
    coerce_training(config.training)
    return call.proceed()
