"""Memory and steps of an optimizer that Megatron offloads to the CPU.

The figures are in ``policy.optimizer_plan.obstacles`` and docs/megatron.md.
"""

from __future__ import annotations

from typing import Any

import pytest

import precision_shim

from ..stand_ins.fake_gpu import FakeGpu
from . import builds
from .offloading import OFFLOAD
from .test_masters import gpu

__all__ = ["gpu"]

pytestmark = pytest.mark.filterwarnings("ignore")
pytest.importorskip("megatron.core", reason="megatron-core is not installed")

AWARE: dict[str, Any] = OFFLOAD | {"use_precision_aware_optimizer": True}
FP16 = {"initial_loss_scale": 1024.0}


@pytest.mark.parametrize(
    ("build", "on_gpu"),
    [
        (builds.Build(config=OFFLOAD), 2 + 4 + 4),
        (builds.Build(config=AWARE), 2 + 4),
        (builds.Build(fp32_bucket=False, config=AWARE | {"main_grads_dtype": builds.BF16}), 2 + 2),
    ],
    ids=["not precision-aware", "fp32 main grads", "bf16 main grads"],
)
def test_bytes_per_parameter(gpu: FakeGpu, build: builds.Build, on_gpu: int) -> None:
    made = builds.make(build)
    assert precision_shim.audit(*made).ok  # the first step's states do not exist yet
    builds.step_without_forward(*made)
    gpu.names_devices = True
    audit = precision_shim.audit(*made)
    (part,) = audit.parts
    assert audit.ok
    assert {one.dtypes for name, one in part.components.items() if "exp" in name} == {("fp32",)}
    # The remaining bytes are scales, step counts and the model's buffers.
    host = audit.totals["host"]
    assert 16 <= host / part.parameters < 16.1
    assert on_gpu <= (audit.totals["bytes"] - host) / part.parameters < on_gpu + 0.1


def test_moments_that_offload_keeps_in_fp32(gpu: FakeGpu) -> None:
    made = builds.make(builds.Build(config=AWARE | {"exp_avg_dtype": builds.BF16}))
    builds.step_without_forward(*made)
    (problem,) = precision_shim.audit(*made).problems
    assert problem.code == "moment-dtype"
    assert "is made, without optimizer_cpu_offload, or leave it out" in problem.message


def test_megatron_offloads_no_fp32_parameters(gpu: FakeGpu) -> None:
    """The plan refuses this; see ``problems_of``."""
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        builds.make(builds.Build(builds.FP32, config=OFFLOAD))


@pytest.mark.parametrize(
    ("plain", "aware"),
    [
        (builds.Build(config=OFFLOAD), builds.Build(config=AWARE)),
        (
            builds.Build(builds.FP16, config=OFFLOAD | FP16),
            builds.Build(builds.FP16, config=AWARE | FP16 | {"store_param_remainders": False}),
        ),
    ],
    ids=["bf16", "fp16"],
)
def test_the_steps_are_the_same(gpu: FakeGpu, plain: builds.Build, aware: builds.Build) -> None:
    losses = [builds.train(*builds.make(one), 5) for one in (plain, aware)]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
