"""The dtypes in which the trainer and the generator of an RL job compute.

torchtitan's RL package has no reference model and no teacher. ``Controller`` is the driver. The
trainer sends weights rounded once to ``generator_dtype``. In a generator, vLLM runs torchtitan's
own model, and so accepts float16 for each ``model_type``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from precision_shim.adapting import Call, Settings, current_settings, decide, seam, versioned
from precision_shim.adapting.rollouts import AUTO, Head, compare

from ...agreement.names import write_key
from ...agreement.report import FEATURE, Sides, report_sides
from ..config import engine_dtype_name, engines, generator_dtype_name
from ..training.trainers import CONTROLLER, FRAMEWORK, GENERATORS, POLICY, ROLLOUT
from . import lm_head

_HERE: dict[str, Any] = {
    "feature": FEATURE,
    "group": ROLLOUT,
    "delete_when": "torchtitan compares the two dtypes, and accepts aliases of dtype names",
    "optional": True,
}


def coerce_generator(config: Any) -> None:
    """Replace the dtype name in a generator's config by the name that vLLM and torchtitan accept.

    Raises:
        DtypeError: the name is unknown.
    """
    config.model_dtype = engine_dtype_name(config.model_dtype, (AUTO,))


def read_sides(
    training: Any, model_dtype: Any, heads: Sequence[Head] = (), spec: Any = None
) -> Sides:
    """Both sides of an RL job, without a trainer if the dtype of one side is not known.

    ``model_dtype`` is torchtitan's name of the generator's dtype, and ``spec`` the ``ModelSpec``.
    """
    found = engines(training, model_dtype, spec)
    trainer, others = (found[0], found[1:]) if found else (None, ())
    return Sides(FRAMEWORK, versioned(FRAMEWORK), trainer, others, heads)


def read_job(config: Any, settings: Settings) -> Sides:
    """Both sides of the job of a controller's config."""
    # Trainer and generators have one LM head, which ``settings`` may ask for in fp32.
    heads = lm_head.read_heads(config) if settings["head"] == "fp32" else ()
    training, model_dtype = config.trainer.training, config.generator.model_dtype
    return read_sides(training, model_dtype, heads, config.model_spec)


def _write(config: Any, key: str, value: object) -> None:
    if key == lm_head.CONVERTER:
        lm_head.write(config)
    else:
        write_key(config, key, value)


@seam(
    f"{GENERATORS}.Config.__init__",
    why="the driver's config goes on to the trainer and to vLLM",
    **_HERE,
)
def build_generator_config(call: Call, model_dtype: Any) -> None:
    """Build a generator's config with a dtype name that vLLM and torchtitan accept."""
    call.proceed()
    coerce_generator(call.instance)


@seam(
    f"{GENERATORS}.__init__",
    why="a name that was assigned after the config was built, before vLLM sees it",
    **_HERE,
)
def build_generator(call: Call, config: Any) -> Any:
    """Replace the dtype name in a generator's config by a name that vLLM accepts."""
    coerce_generator(config)
    return call.proceed()


@seam(
    f"{CONTROLLER}.__init__",
    why="the driver, before it starts a process of the trainer or of a generator",
    **_HERE,
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
    report_sides(read_job(config, current_settings()), partial(_write, config))
    return call.proceed()


@seam(
    f"{POLICY}.__init__",
    why="the trainer looks the generator's name up in a dict that knows three, and other drivers "
    "than Controller start trainers",
    **_HERE,
)
def build_policy_trainer(
    call: Call, config: Any, generator_dtype: Any, model_spec: Any = None
) -> None:
    """Replace the name of the sent weights' dtype; report the dtypes of trainer and generator."""
    name = generator_dtype_name(generator_dtype)
    if "generator_dtype" in call.arguments:
        call.arguments["generator_dtype"] = name
    call.proceed()
    sides = read_sides(config.training, name, spec=model_spec)
    if sides.trainer is not None:
        verdict = compare(sides.trainer, *sides.others)
        decide(FRAMEWORK, "rollout", FEATURE, verdict.chosen, verdict.because)
