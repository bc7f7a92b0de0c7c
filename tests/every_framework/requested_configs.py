"""A table of requested, the values that users request of Megatron's optimizer, with their plans.

The tests of each framework on Megatron write a case into its real config, and compare the plan with
the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from precision_shim.precision.model import TrainableDtypes
from precision_shim_adapters.megatron import Build, OptimizerPlan, RequestedConfig
from precision_shim_adapters.megatron.policy.bucket import choose_bucket

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
AWARE = "use_precision_aware_optimizer"
LOW_BETA2 = {"adam_beta2": 0.95}
"""A beta2 at which a bf16 second moment can decay, so that no message appears."""

DEFAULTS = {
    AWARE: False,
    "main_grads_dtype": FP32,
    "exp_avg_dtype": FP32,
    "exp_avg_sq_dtype": FP32,
    "bf16": False,
    "fp16": False,
    "params_dtype": FP32,
}
"""Megatron's own defaults, for fields that nobody sets."""

FLAGS = {
    BF16: {"bf16": True, "params_dtype": BF16},
    FP16: {"fp16": True, "params_dtype": FP16},
    FP32: {},
}


@dataclass(frozen=True)
class Case:
    """What is requested, and the expected plan.

    Attributes:
        name: for the test's id.
        dtype: the model's.
        asked: fields of Megatron's OptimizerConfig that the user writes.
        bucket: ``grad_reduce_in_fp32`` as the user writes it; ``None`` if the user omits it.
        settings: the shim's.
        fields: the OptimizerConfig's fields that differ from ``DEFAULTS`` and from the dtype's
            flags.
        in_fp32: ``grad_reduce_in_fp32`` in force.
        told: words of the one message for the user; ``""`` if there is none.
    """

    name: str
    dtype: torch.dtype = BF16
    asked: Mapping[str, Any] = field(default_factory=dict)
    bucket: bool | None = None
    settings: Mapping[str, Any] = field(
        default_factory=lambda: {"optimizer_states": "follow-model"}
    )
    fields: Mapping[str, Any] = field(default_factory=dict)
    in_fp32: bool = True
    told: str = ""


_MOMENTS = {AWARE: True, "exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}
_ROW = {**_MOMENTS, "main_grads_dtype": BF16}
_ALIGN = {"optimizer_states": "follow-model", "grad_bucket": "align"}
_AS_CONFIGURED = {"optimizer_states": "as-configured"}

CASES = (
    Case("nothing written", asked=LOW_BETA2, fields=_ROW, in_fp32=False),
    Case(
        "fp32 bucket written",
        asked=LOW_BETA2,
        bucket=True,
        fields=_MOMENTS,
        told="grad_reduce_in_fp32=True is the user's",
    ),
    Case("low bucket written", asked=LOW_BETA2, bucket=False, fields=_ROW, in_fp32=False),
    Case(
        "fp32 bucket written, align",
        asked=LOW_BETA2,
        bucket=True,
        settings=_ALIGN,
        fields=_ROW,
        in_fp32=False,
    ),
    Case(
        "bf16 main grads and fp32 bucket written",
        asked={**LOW_BETA2, AWARE: True, "main_grads_dtype": "bf16"},
        bucket=True,
        fields=_ROW,
        told="grad_reduce_in_fp32=True gives the gradient bucket another dtype",
    ),
    Case(
        "fp32 main grads written", asked={**LOW_BETA2, "main_grads_dtype": "fp32"}, fields=_MOMENTS
    ),
    Case(
        "switched off, low bucket written",
        asked={AWARE: False},
        bucket=False,
        in_fp32=False,
        told="grad_reduce_in_fp32=False gives the gradient bucket another dtype",
    ),
    Case(
        "one moment written",
        asked={**LOW_BETA2, "exp_avg_sq_dtype": "torch.float32"},
        fields={**_ROW, "exp_avg_sq_dtype": FP32},
        in_fp32=False,
    ),
    Case("optimizer offload", asked={**LOW_BETA2, "optimizer_cpu_offload": True}),
    Case("as configured, nothing written", settings=_AS_CONFIGURED),
    Case(
        "as configured, opted in",
        asked={AWARE: True, "main_grads_dtype": "bf16", "exp_avg_dtype": "BFloat16"},
        settings=_AS_CONFIGURED,
        fields={AWARE: True, "main_grads_dtype": BF16, "exp_avg_dtype": BF16},
        in_fp32=False,
    ),
    Case(
        "as configured, opted in, fp32 bucket written",
        asked={AWARE: True, "main_grads_dtype": "bf16"},
        bucket=True,
        settings=_AS_CONFIGURED,
        fields={AWARE: True, "main_grads_dtype": BF16},
        told="grad_reduce_in_fp32=True gives the gradient bucket another dtype",
    ),
    Case("fp16", dtype=FP16, fields={AWARE: True}),
    Case(
        "fp16, fp16 bucket written",
        dtype=FP16,
        bucket=False,
        in_fp32=False,
        told="grad_reduce_in_fp32=False gives the gradient bucket another dtype",
    ),
    Case("fp16, SGD", dtype=FP16, asked={"optimizer": "sgd"}),
    Case("fp32", dtype=FP32),
)

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def expected(case: Case) -> tuple[dict[str, Any], bool, str]:
    """The expected OptimizerConfig's fields, ``grad_reduce_in_fp32``, and message."""
    return {**DEFAULTS, **FLAGS[case.dtype], **case.fields}, case.in_fp32, case.told


def outcome(
    case: Case, requested: RequestedConfig, plan: OptimizerPlan
) -> tuple[dict[str, Any], bool, str]:
    """The fields, bucket and message of a plan; a framework's own bucket is fp32 by default."""
    choice = choose_bucket(
        present=case.bucket is not False,
        user_set=requested.bucket_in_fp32 is not None,
        align=case.settings.get("grad_bucket") == "align",
        main_grads=plan.main_grads,
        model=TrainableDtypes({case.dtype: 8}),
    )
    messages = [text for text in (*plan.warnings, choice.problem) if text]
    found = {key: plan.fields.get(key, default) for key, default in DEFAULTS.items()}
    as_expected = len(messages) == 1 and case.told and case.told in messages[0]
    told = case.told if as_expected else "; ".join(messages)
    return found, choice.grad_reduce_in_fp32, told


def outcome_in(
    framework: str, case: Case, requested: RequestedConfig
) -> tuple[dict[str, Any], bool, str]:
    """The outcome of the plan that this process makes for a framework."""
    build = Build(framework, lambda: requested)
    build.seen = TrainableDtypes({case.dtype: 8})
    return outcome(case, requested, build.plan(build.in_force()))
