"""SkyRL: compare the dtypes of policy, reference model and inference engines.

SkyRL validates a job's config in the driver, before Ray starts, so every actor receives the dtypes
that the shim writes into the config.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from precision_shim.adapting import Call, in_force, report, seam, versioned
from precision_shim.adapting.dtypes import name_of
from precision_shim.adapting.rollouts import judge_wires

from ...agreement.lm_head import IsInForce
from ...agreement.names import engine_name
from ...agreement.report import FEATURE, Sides, report_sides
from ..config import KEY
from ..written import ROLLOUT
from . import dtypes, lm_head

_UTILS = "skyrl.train.utils.utils"
_COMPARES = "SkyRL compares its engines' dtypes with the policy's"


def _validation(name: str, entrypoint: str) -> dict[str, Any]:
    copies = ("skyrl.train.utils", f"skyrl.train.entrypoints.{entrypoint}")
    return {"target": f"{_UTILS}:{name}", "aliases": tuple(f"{module}:{name}" for module in copies)}


@seam(
    feature=FEATURE,
    at=[
        _validation("validate_generator_cfg", "main_generate"),
        {
            **_validation("validate_inference_engine_cfg", "serve"),
            "only_if": (f"{_UTILS}:validate_inference_engine_cfg",),
        },
    ],
    group=ROLLOUT,
    why="jobs that only generate or serve call no other validation",
    delete_when="SkyRL takes all spellings of a dtype for its engines",
    relies_on=("generator",),
)
def hand_on_names(call: Call, cfg: Any) -> Any:
    """Replace the inference engines' dtype names by names that the engines accept.

    Raises:
        DtypeError: a key's value is no dtype in which an engine computes.
    """
    dtypes.hand_on_names(cfg)
    return call.proceed()


@seam(
    feature=FEATURE,
    group=ROLLOUT,
    why="every training job calls it in the driver, before Ray starts",
    delete_when=_COMPARES,
    relies_on=("validate_generator_cfg", "policy"),
    **_validation("validate_cfg", "main_base"),
)
def compare(call: Call, cfg: Any) -> Any:
    """Compare the dtypes of a training job's policy, reference model and inference engines.

    Raises:
        DtypeError: a key's value is no dtype name.
        UnsupportedPrecisionError: strict mode is on, the policy is fp16, and an engine is not.
    """
    dtypes.hand_on_names(cfg)
    result = call.proceed()
    _report(cfg)
    return result


@seam(
    "skyrl.backends.skyrl_train_backend:_build_skyrl_train_config",
    FEATURE,
    group=f"{ROLLOUT} tinker",
    why="the Tinker server makes its config here and validates it nowhere",
    delete_when=_COMPARES,
    relies_on=("from_cli_overrides",),
    optional=True,
)
def compare_tinkers(call: Call) -> Any:
    """Compare a Tinker server's dtypes, as ``compare`` does for a training job."""
    config = call.proceed()
    dtypes.hand_on_names(config)
    _report(config)
    return config


def read_sides(config: Any, in_force: IsInForce, directory: str = "") -> Sides:
    """Read both sides of a job that has a rollout; see ``dtypes.sides_of``."""
    # SkyRL parses model_dtype for each weight sync, and rejects "auto".
    written = config.generator.inference_engine.model_dtype
    engine_name(written, KEY, versioned("skyrl"), also=())
    heads = lm_head.read_heads(config, in_force)
    return replace(dtypes.sides_of(config, in_force, directory), heads=heads)


def _report(config: Any) -> None:
    sides = read_sides(config, partial(in_force, "skyrl"))
    report_sides(sides, partial(dtypes.write, config))
    if sides.trainer is not None:
        report(dtypes.judge_syncs(config, may_write=True))


@seam(
    feature=FEATURE,
    group=f"{ROLLOUT} weight sync",
    why="rounds every weight to the dtype of the base checkpoint, which the driver may not have",
    relies_on=("_stage_tensor_for_publish", "is_source_rank", "version", *dtypes.READ),
    **dtypes.PUBLISHER,
)
def tell_of_delta(call: Call, source: Any) -> Any:
    """Report the dtype of the sent weights, in the worker that sends the first delta."""
    sent = getattr(source, "_dtype", None)
    if call.instance.version == 0 and sent is not None:
        wires = dtypes.delta_wires({name_of(sent)}, dtypes.base_dtypes(call.instance))
        report(judge_wires("skyrl", versioned("skyrl"), wires), raises=None)
    return call.proceed()
