"""SkyRL: compare the dtypes of policy, reference model and inference engines.

SkyRL validates a job's config in the driver, before Ray starts. Every actor therefore receives the
dtypes that the shim writes into the config. SkyRL casts the weights to ``model_dtype`` once before
it sends them, in every version and on every path except the delta sync.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from precision_shim.adapting import Call, decide, in_force, seam, versioned
from precision_shim.precision.dtypes import name_of

from ...agreement.lm_head import report_heads
from ...agreement.names import engine_name, write_key
from ...agreement.report import FEATURE, report_engines
from ...agreement.weight_sync import tell_of_wires
from ..config import ROLLOUT
from . import dtypes, lm_head

_UTILS = "skyrl.train.utils.utils"
_DELTA = "skyrl.backends.skyrl_train.weight_sync.delta.checkpoint"
_ENTRYPOINTS = "skyrl.train.entrypoints"


@seam(
    feature=FEATURE,
    at=[
        {
            "target": f"{_UTILS}:validate_generator_cfg",
            "aliases": (
                "skyrl.train.utils:validate_generator_cfg",
                f"{_ENTRYPOINTS}.main_generate:validate_generator_cfg",
            ),
        },
        {
            "target": f"{_UTILS}:validate_inference_engine_cfg",
            "aliases": (
                "skyrl.train.utils:validate_inference_engine_cfg",
                f"{_ENTRYPOINTS}.serve:validate_inference_engine_cfg",
            ),
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
    f"{_UTILS}:validate_cfg",
    FEATURE,
    group=ROLLOUT,
    why="every training job calls it in the driver, before Ray starts",
    delete_when="SkyRL compares its engines' dtypes with the policy's",
    relies_on=("validate_generator_cfg", "policy"),
    aliases=("skyrl.train.utils:validate_cfg", f"{_ENTRYPOINTS}.main_base:validate_cfg"),
)
def compare(call: Call, cfg: Any) -> Any:
    """Compare the dtypes of a training job's policy, reference model and inference engines.

    Raises:
        DtypeError: a key's value is no dtype name.
        UnsupportedPrecisionError: strict mode is on, the policy is fp16, and an engine is not.
    """
    dtypes.hand_on_names(cfg)
    result = call.proceed()
    _settle(cfg)
    return result


@seam(
    "skyrl.backends.skyrl_train_backend:_build_skyrl_train_config",
    FEATURE,
    group=f"{ROLLOUT} tinker",
    why="the Tinker server makes its config here and validates it nowhere",
    delete_when="SkyRL compares its engines' dtypes with the policy's",
    relies_on=("from_cli_overrides",),
    optional=True,
)
def compare_tinkers(call: Call) -> Any:
    """Compare a Tinker server's dtypes, as ``compare`` does for a training job.

    Raises:
        DtypeError: a key's value is no dtype name.
        UnsupportedPrecisionError: strict mode is on, the policy is fp16, and an engine is not.
    """
    config = call.proceed()
    dtypes.hand_on_names(config)
    _settle(config)
    return config


def _settle(config: Any) -> None:
    where = versioned("skyrl")
    # SkyRL parses model_dtype for each weight sync, and rejects "auto".
    engine_name(config.generator.inference_engine.model_dtype, dtypes.KEY, where, also=())
    ours = partial(in_force, "skyrl")
    report_heads(where, partial(lm_head.read_heads, config, ours), partial(write_key, config))
    both = dtypes.sides_of(config, ours)
    if both.trainer is None:
        decide("skyrl", "rollout", FEATURE, *dtypes.not_compared(config))
        return
    if both.trainer.because:
        decide("skyrl", "policy", FEATURE, both.trainer.computes, both.trainer.because)
    report_engines(where, both.trainer, both.others, partial(dtypes.write, config), both.model_type)
    for chosen, because in dtypes.send_in_engines_dtype(config):
        decide("skyrl", "rollout", FEATURE, chosen, because)
    tell_of_wires(where, dtypes.wires_of(config))


@seam(
    f"{_DELTA}:DeltaCheckpointPublisher.create_delta_files",
    FEATURE,
    group=f"{ROLLOUT} weight sync",
    only_if=(f"{_DELTA}:DeltaCheckpointPublisher",),
    why="rounds every weight to the dtype of the base checkpoint, which the driver may not have",
    delete_when="SkyRL's delta sync sends model_dtype",
    relies_on=("_stage_tensor_for_publish", "target_dtype", "_base_location", "is_source_rank"),
    optional=True,
)
def tell_of_delta(call: Call, source: Any) -> Any:
    """Report the dtype of the sent weights, in the worker that sends the first delta."""
    publisher = call.instance
    sent = getattr(source, "_dtype", None)
    if publisher.version == 0 and publisher._current_rank() == 0 and sent is not None:
        stored = dtypes.dtypes_of_locations(publisher._ensure_base_locations())
        wires = dtypes.delta_wires({name_of(sent)}, stored)
        tell_of_wires(versioned("skyrl"), wires, may_raise=False)
    return call.proceed()
