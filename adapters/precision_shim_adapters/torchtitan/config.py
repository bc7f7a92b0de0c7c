"""The one reader of torchtitan's config, which replaces every spelling of a dtype there.

torchtitan compares dtype names as strings, and looks them up in a dict of three names. The shim
replaces a name when torchtitan builds a config, and again when a trainer receives the config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, Literal, get_args, get_origin

import torch

from precision_shim.adapting import Call, seam, versioned
from precision_shim.adapting.dtypes import COMPUTES, REDUCES, Written, name_of, parse_dtype
from precision_shim.adapting.rollouts import AUTO, Engine, Format, formats
from precision_shim.errors import DtypeError

from ..agreement.names import engine_name
from ..torch_fp16.names import unscaled
from .training.trainers import CONTROLLER, FRAMEWORK, NAMES, POLICY, RL, TRAINER

FEATURE = "dtype-coercion"
SETS = {"dtype": "params", "mixed_precision_param": COMPUTES, "mixed_precision_reduce": REDUCES}
"""Maps a dtype key of ``TrainingConfig`` to what it sets."""

OWN_NAMES = {getattr(torch, name): name for name in ("float16", "bfloat16", "float32")}
"""Maps each dtype in which torchtitan trains and generates to torchtitan's only name for it."""


_FORMATS = {
    "Float8": formats.in_e4m3(formats.CHANNEL, formats.TOKEN),
    "MXFP8": formats.in_e4m3(formats.MX, formats.MX),
    "NVFP4": formats.parts_of(
        formats.Quantized("e2m1", formats.NVFP4_WEIGHTS), formats.Quantized("e2m1", formats.NVFP4)
    ),
}
"""Maps how the names of quantized modules begin to what they compute in with torchao's kernels."""

_NAMES = frozenset(OWN_NAMES.values())
BECAUSE = "training.mixed_precision_param is float16, and torchtitan does not scale the loss"
KEY = "generator.model_dtype"
TRAINER_KEY = "trainer.training.mixed_precision_param"
_SPELLINGS = "float16/fp16/half/16, bfloat16/bf16, float32/fp32/float/32"
_COERCES: dict[str, Any] = {
    "feature": FEATURE,
    "upstream": "https://github.com/pytorch/torchtitan/issues/2356",
    "delete_when": "torchtitan accepts aliases of dtype names",
}


def own_name(value: Any, key: str) -> Any:
    """Torchtitan's name for a dtype name or a ``torch.dtype``; other values are unchanged.

    Raises:
        DtypeError: torchtitan does not compute in this dtype, or the name is unknown.
    """
    if not isinstance(value, str | torch.dtype):
        return value
    dtype = parse_dtype(value) if isinstance(value, str) else value
    name = OWN_NAMES.get(dtype)
    if name is None:
        raise DtypeError(
            f"{versioned(FRAMEWORK)}: {key}={value!r} names no dtype that torchtitan computes "
            f"in; allowed: {_SPELLINGS}, in any case, also with the prefix 'torch.'. "
            f"Correct {key}.",
            key=key,
        )
    return name


def _is_dtype(annotation: Any) -> bool:
    """Whether a field's type is a choice of torchtitan's dtype names, which nothing else has."""
    return get_origin(annotation) is Literal and _NAMES.issuperset(get_args(annotation))


def coerce_config(config: Any, place: str = "") -> None:
    """Replace the dtype names in a config, and in every config inside it, by torchtitan's own.

    These are the fields with a choice of dtype names, and those whose default is a dtype name: the
    type may be a string here, or any string, which may leave the choice to the reader (``auto``).

    Args:
        config: the config, which is a dataclass.
        place: the config's key, with a dot at its end; empty for the outermost.

    Raises:
        DtypeError: a name is unknown, or parameters and optimizer states would be float16.
    """
    for field in dataclasses.fields(config):
        value, key = getattr(config, field.name, None), f"{place}{field.name}"
        word = isinstance(field.default, str) and field.default in _NAMES
        if _is_dtype(field.type) or (word and value not in ("", AUTO)):
            setattr(config, field.name, own_name(value, key))
        for one in value if isinstance(value, list | tuple) else (value,):
            if dataclasses.is_dataclass(one) and not isinstance(one, type):
                coerce_config(one, f"{key}.")
    if hasattr(config, "mixed_precision_param"):
        refuse_float16_states(config, place)


def written(training: Any, prefix: str) -> tuple[Written, ...]:
    """The dtype keys of a ``TrainingConfig``; ``prefix`` is what stands before ``training.``."""
    return tuple(
        Written(f"{prefix}training.{key}", getattr(training, key), sets)
        for key, sets in SETS.items()
    )


def computes_in_float16(training: Any) -> bool:
    """Whether a ``TrainingConfig`` makes the model compute in float16."""
    name = training.mixed_precision_param
    return isinstance(name, str) and parse_dtype(name) is torch.float16


def refuse_float16_states(training: Any, place: str = "training.") -> None:
    """Raise a ``DtypeError`` if a config has parameters and optimizer states in float16."""
    if isinstance(training.dtype, str) and parse_dtype(training.dtype) is torch.float16:
        raise DtypeError(
            f"{versioned(FRAMEWORK)}: {place}dtype={training.dtype!r} puts parameters and "
            "optimizer states into float16, where AdamW's eps of 1e-8 is 0 and parameters are not "
            "finite after a few finite steps; allowed: float32, bfloat16. Leave "
            f"{place}dtype out, and set {place}mixed_precision_param=float16 to compute in fp16.",
            key=f"{place}dtype",
        )


def find_unscaled(training: Any, place: str = "training") -> str:
    """Return a warning if FSDP sums gradients in float16 although nothing scales the loss."""
    computes = parse_dtype(str(training.mixed_precision_param))
    sums = parse_dtype(str(training.mixed_precision_reduce))
    says = [f"{place}.mixed_precision_reduce"] if sums is torch.float16 else []
    return unscaled(versioned(FRAMEWORK), says, computes, f"{place}.mixed_precision_param")


def generator_dtype_name(value: Any) -> Any:
    """torchtitan's name of the generator's dtype, in which the trainer sends the weights.

    Raises:
        DtypeError: the name is unknown, or is ``auto``, which lets vLLM choose the dtype.
    """
    if isinstance(value, str) and value.strip().lower() == AUTO:
        raise DtypeError(
            f"{versioned(FRAMEWORK)}: {KEY}={value!r}: vLLM chooses the dtype in another process, "
            "and the trainer has to know it to send the weights in it; allowed here: "
            "float16/fp16/half, bfloat16/bf16, float32/fp32/float. Write the dtype that vLLM is to "
            "generate in.",
            key=KEY,
        )
    return engine_dtype_name(value, ())


def engine_dtype_name(value: Any, also: Sequence[str]) -> Any:
    """The name that vLLM and torchtitan have for the generator's dtype; empty values are kept."""
    if value is None or value == "":  # the weights are sent in the trainer's dtype
        return value
    return engine_name(value, KEY, versioned(FRAMEWORK), also)


def format_of(spec: Any) -> Format | None:
    """What the modules that torchtitan's converters replaced in a ``ModelSpec`` compute in.

    Trainer and generators build the model of one ``ModelSpec``.
    """
    if spec is None:
        return None
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import GroupedExperts

    kinds, kept, converted = dict[str, dict[str, formats.Quantized]](), set[str](), set[str]()
    for kind in (Linear, GroupedExperts):
        for name, node, *_ in spec.model.traverse(kind.Config):
            made = type(node)._owner.__name__
            parts = next((_FORMATS[one] for one in _FORMATS if made.startswith(one)), None)
            own = getattr(node, "_torchao_config", None)
            if own is not None and own.cast_config_weight.scaling_granularity.value == "tensorwise":
                parts = formats.in_e4m3(formats.TENSOR, formats.TENSOR)
            (kept if parts is None else converted).add(name.rpartition(".")[2])
            kinds |= {} if parts is None else {made: parts}
    if not kinds:
        return None
    first, *others = kinds.values()
    if any(one != first for one in others):
        first = formats.parts_of(
            formats.Quantized(formats.UNKNOWN), formats.Quantized(formats.UNKNOWN)
        )
    left_out = (*sorted(kept - converted), *(("some layers",) if kept & converted else ()))
    return Format(first, left_out, f"model_spec: {', '.join(kinds)}")


def engines(training: Any, model_dtype: Any, spec: Any = None) -> tuple[Engine, Engine] | None:
    """The dtypes of trainer and generator (torchtitan's name); ``None`` if either is not known."""
    computes = parse_dtype(str(training.mixed_precision_param))
    generates = parse_dtype(str(model_dtype))
    if computes is None or generates is None:
        return None
    format = format_of(spec)
    rollout = Engine("rollout", name_of(generates), KEY, model_dtype, format=format)
    return Engine("policy", name_of(computes), TRAINER_KEY, format=format), rollout


@seam(
    "torchtitan.config.configs:TrainingConfig.__init__",
    group=NAMES,
    why="before any comparison: RL's controller compares names while its config is built",
    **_COERCES,
)
def build_training(call: Call, dtype: Any, mixed_precision_param: Any) -> None:
    """Build a ``TrainingConfig`` with torchtitan's dtype names."""
    call.proceed()
    coerce_config(call.instance, "training.")


@seam(
    "torchtitan.config.manager:ConfigManager.parse_args",
    group=NAMES,
    why="the command line knows only the values that stand in the annotations of a config",
    relies_on=("tyro", "cli"),
    **_COERCES,
)
def parse_args(call: Call) -> Any:
    """Make the command line accept every spelling of a dtype, without a new option.

    Raises:
        DtypeError: a name in the config or on the command line is unknown.
    """
    with any_name():
        config = call.proceed()
    coerce_config(config)
    return config


@contextmanager
def any_name() -> Iterator[None]:
    """Make tyro accept any string where a config has a choice of dtype names; others check it."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

    registry, choices = ConstructorRegistry(), "{" + ",".join(OWN_NAMES.values()) + "}"

    word = PrimitiveConstructorSpec(1, choices, itemgetter(0), bool, lambda value: [str(value)])
    registry.primitive_rule(lambda asked: word if _is_dtype(asked.type) else None)
    with registry:
        yield


@seam(
    at=[
        {
            "target": target,
            "group": RL,
            "why": "it hands the config on to code that looks names up in a dict that knows three",
            "optional": True,
        }
        for target in (f"{POLICY}.__init__", f"{CONTROLLER}.__init__")
    ]
    + [
        {
            "target": f"{TRAINER}.__init__",
            "group": NAMES,
            "why": "a name that was assigned after the config was built",
        }
    ],
    **_COERCES,
)
def build_trainer(call: Call, config: Any, model_spec: Any = None) -> Any:
    """Replace the dtype names in a trainer's or controller's config by torchtitan's names.

    Raises:
        DtypeError: a name is unknown, or parameters and optimizer states would be float16.
    """
    for one in filter(None, (config, model_spec)):
        coerce_config(one)
    return call.proceed()
