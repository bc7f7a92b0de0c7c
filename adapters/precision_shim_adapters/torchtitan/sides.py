"""The dtypes in which the trainer and the generator of an RL job compute.

torchtitan's RL package has no reference model and no teacher. ``Controller`` is the driver, and has
the whole config before it starts the processes of the trainer and of the generators. The trainer
receives the generator's dtype as ``generator_dtype``, and sends weights rounded once to this dtype.
In a generator, vLLM runs torchtitan's own model, and so accepts float16 for each ``model_type``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from precision_shim.adapting import Call, current_settings, decide, seam, versioned
from precision_shim.errors import DtypeError
from precision_shim.precision.agreement import compare
from precision_shim.precision.dtypes import name_of, parse_dtype

from ..released import are_released
from ..rollout import AUTO, FEATURE, Engine, engine_name, settle, settle_heads
from . import head
from .places import COMMAND_LINE, FRAMEWORK, GENERATORS, POLICY, ROLLOUT

KEY = "generator.model_dtype"
TRAINER_KEY = "trainer.training.mixed_precision_param"

_DELETE = "torchtitan compares the two dtypes, and accepts aliases of dtype names"
_MODULES = (
    "torchtitan.models.{}.config_registry",
    "torchtitan.experiments.{}.config_registry",
    "torchtitan.experiments.rl.examples.{}.config_registry",
    "{}.config_registry",
    "{}",
)
"""Names under which torchtitan searches the module of ``--module``, in torchtitan's order."""

_UNWRITTEN: dict[str, str] = {}
"""Maps a dtype's name to the string object that ``unwritten`` returns for this name."""


def coerce_generator(config: Any) -> None:
    """Replace the dtype name in a generator's config by the name that vLLM and torchtitan accept.

    Raises:
        DtypeError: the name is unknown.
    """
    value = config.model_dtype
    name = _name(value, (AUTO,))
    if name != value:  # keep a string object from ``unwritten``
        config.model_dtype = name


def generator_dtype_name(value: Any) -> Any:
    """torchtitan's own name of the generator's dtype, in which the trainer sends the weights.

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
    return _name(value, ())


def _name(value: Any, also: Sequence[str]) -> Any:
    if value is None or value == "":  # the weights are sent in the trainer's dtype
        return value
    return engine_name(value, KEY, versioned(FRAMEWORK), also)


def unwritten(name: str) -> str:
    """Return a string object that equals a dtype's name and marks it as not written by the user.

    The returned object is never the user's own string. tyro and ``dataclasses.replace`` do not copy
    strings.
    """
    return _UNWRITTEN.setdefault(name, name[:1] + name[1:])


def is_written(value: object) -> bool:
    """Whether the user wrote a value; false only for string objects from ``unwritten``."""
    return not (isinstance(value, str) and _UNWRITTEN.get(value) is value)


def mark_released(config: Any, arguments: Sequence[str]) -> None:
    """Mark the generator's dtype as not the user's if torchtitan's own config function set it.

    Args:
        config: the result of torchtitan's config function, before command-line options change it.
        arguments: the job's arguments, with ``--module`` and ``--config``.
    """
    generator = getattr(config, "generator", None)
    value = getattr(generator, "model_dtype", None)
    if generator is not None and isinstance(value, str) and value and _is_released(arguments):
        generator.model_dtype = unwritten(value)


def _is_released(arguments: Sequence[str]) -> bool:
    """Whether the file of the job's config function is unchanged since torchtitan's release."""
    name = _word(arguments, "--module").strip()
    modules = (sys.modules.get(place.format(name)) for place in _MODULES if name)
    module = next((imported for imported in modules if imported is not None), None)
    function = getattr(module, _word(arguments, "--config"), None)
    try:
        path = Path(inspect.getfile(inspect.unwrap(function)))  # type: ignore[arg-type]
    except TypeError:
        return False
    return are_released(FRAMEWORK, [path])


def _word(arguments: Sequence[str], option: str) -> str:
    given, words = "", iter(arguments)
    for word in words:
        head, equals, value = word.partition("=")
        if head == option:
            given = value if equals else next(words, "")
    return given


@contextmanager
def marked() -> Iterator[None]:
    """In a plan, mark dtypes that the user did not write, as the seams mark them in a job."""
    from torchtitan.config import ConfigManager
    from torchtitan.experiments.rl.actors.generator import VLLMGenerator

    defaults: dict[str, Any] = VLLMGenerator.Config.__init__.__kwdefaults__
    load = ConfigManager._load_config
    before = defaults["model_dtype"]

    def load_config(self: Any, args: Any) -> Any:
        config = load(self, args)
        mark_released(config[0], args)
        return config

    defaults["model_dtype"] = unwritten(before)
    ConfigManager._load_config = load_config
    try:
        yield
    finally:
        defaults["model_dtype"] = before
        ConfigManager._load_config = load


def engines(training: Any, model_dtype: Any) -> tuple[Engine, Engine] | None:
    """The dtypes of trainer and generator; ``None`` if either dtype is not known.

    Args:
        training: the trainer's ``TrainingConfig``.
        model_dtype: the generator's dtype, one of torchtitan's names.
    """
    computes = parse_dtype(str(training.mixed_precision_param))
    generates = parse_dtype(str(model_dtype))
    if computes is None or generates is None:
        return None
    return (
        Engine("policy", name_of(computes), TRAINER_KEY),
        Engine("rollout", name_of(generates), KEY, is_written(model_dtype)),
    )


@seam(
    f"{GENERATORS}.Config.__init__",
    FEATURE,
    group=ROLLOUT,
    why="the driver's config goes on to the trainer and to vLLM",
    delete_when=_DELETE,
    optional=True,
)
def build_generator_config(call: Call, model_dtype: Any) -> None:
    """Build a generator's config with a dtype name that vLLM and torchtitan accept."""
    call.proceed()
    config = call.instance
    if "model_dtype" not in call.arguments and isinstance(config.model_dtype, str):
        config.model_dtype = unwritten(config.model_dtype)
    coerce_generator(config)


@seam(
    f"{GENERATORS}.__init__",
    FEATURE,
    group=ROLLOUT,
    why="a name that was assigned after the config was built, before vLLM sees it",
    delete_when=_DELETE,
    optional=True,
)
def build_generator(call: Call, config: Any) -> Any:
    """Replace the dtype name in a generator's config by a name that vLLM accepts."""
    coerce_generator(config)
    return call.proceed()


@seam(
    "torchtitan.experiments.rl.controller:Controller.__init__",
    FEATURE,
    group=ROLLOUT,
    why="the driver, before it starts a process of the trainer or of a generator",
    delete_when=_DELETE,
    optional=True,
)
def build_controller(call: Call, config: Any) -> Any:
    """Compare the dtypes of trainer and generator before the controller starts their processes.

    Raises:
        DtypeError: the generator's dtype is unknown, or ``auto``.
        UnsupportedPrecisionError: strict mode is on, and only the trainer computes in float16.
    """
    generator = config.generator
    generator_dtype_name(generator.model_dtype)
    coerce_generator(generator)
    settle_heads(
        versioned(FRAMEWORK), partial(head.read_heads, config), lambda _: head.write(config)
    )
    both = engines(config.trainer.training, generator.model_dtype)
    if both is not None:
        trainer, rollout = both

        def write(engine: Engine, name: str) -> None:
            generator.model_dtype = name

        settle(versioned(FRAMEWORK), trainer, [rollout], write)
    return call.proceed()


@seam(
    f"{POLICY}.__init__",
    FEATURE,
    group=ROLLOUT,
    why="the trainer looks the generator's name up in a dict that knows three, and other drivers "
    "than Controller start trainers",
    delete_when=_DELETE,
    optional=True,
)
def build_policy_trainer(call: Call, config: Any, generator_dtype: Any) -> None:
    """Replace the name of the sent weights' dtype; report the dtypes of trainer and generator.

    Only the driver warns of different dtypes, because this function runs on every rank.
    """
    name = generator_dtype_name(generator_dtype)
    if "generator_dtype" in call.arguments:
        call.arguments["generator_dtype"] = name
    call.proceed()
    both = engines(config.training, name)
    if both is not None:
        verdict = compare(*both)
        decide(FRAMEWORK, "rollout", FEATURE, verdict.chosen, verdict.because)


@seam(
    "torchtitan.config.manager:ConfigManager._load_config",
    FEATURE,
    group=COMMAND_LINE,
    why="what the config function returned, before the command line changes it",
    delete_when="torchtitan marks the values that the user wrote",
    relies_on=("--module", "--config"),
    optional=True,
)
def load_config(call: Call, args: Any) -> Any:
    """Load a job's config; if ``PRECISION_SHIM_ROLLOUT=follow``, call ``mark_released``."""
    config = call.proceed()
    if current_settings()["rollout"] == "follow":
        mark_released(config[0], args)
    return config
