"""The audit of real Megatron models: it passes honest ones and finds each planted lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import precision_shim
from precision_shim.auditing import sent_weights, weight_audit

from . import builds
from .test_torch import Counting

pytestmark = pytest.mark.filterwarnings("ignore")


def codes(audit: precision_shim.Audit) -> list[str]:
    return [one.code for one in audit.problems]


@pytest.mark.parametrize("name", builds.HONEST)
def test_an_honest_optimizer_has_no_problem(one_process: Any, name: str) -> None:
    chunks, optimizer = builds.make(builds.HONEST[name])
    before = precision_shim.audit(chunks, optimizer)
    builds.step(chunks, optimizer)
    after = precision_shim.audit(chunks, optimizer)
    assert (codes(before), codes(after)) == ([], [])
    assert (before.complete, after.complete) == (False, True)
    at_build, found = (one.parts[0].components for one in (before, after))
    for component in ("params", "grad_buckets", "master", "exp_avg", "exp_avg_sq"):
        assert at_build[component].dtypes == found[component].dtypes


@pytest.mark.parametrize("name", builds.PLANTED)
def test_a_planted_problem_is_found_before_the_first_step(one_process: Any, name: str) -> None:
    code = name.partition(",")[0]
    chunks, optimizer = builds.make(builds.PLANTED[name])
    builds.plant(code, optimizer)
    found = precision_shim.audit(chunks, optimizer)
    assert code in codes(found)
    problem = next(one for one in found.problems if one.code == code)
    assert problem.part == "model"
    assert problem.expected in problem.message
    assert problem.found in problem.message
    assert str(found).count(problem.message) == 1


SUMS = {"param_name_patterns_for_fp32_local_accumulation": ("all",)}


@pytest.mark.parametrize("aware", [False, True])
def test_sums_in_fp32_beside_a_bf16_bucket(one_process: Any, aware: bool) -> None:
    config = pytest.importorskip("megatron.core.distributed").DistributedDataParallelConfig
    if not SUMS.keys() <= config.__dataclass_fields__.keys():
        pytest.skip("needs megatron-core 0.18")
    build = builds.Build(
        fp32_bucket=False, config=builds.PRECISION_AWARE if aware else {}, ddp=SUMS
    )
    held, *made = builds.held_by(build)
    found = precision_shim.audit(*made)
    (part,) = found.parts
    buckets = part.components["grad_buckets"]
    assert (buckets.dtypes, buckets.bytes_per_parameter) == (("bf16",), 6.0)
    assert found.totals["allocated"] == held
    assert codes(found) == ([] if aware else ["main-grads-dtype"])


@pytest.mark.parametrize("name", builds.EIGHT)
def test_nothing_is_started_on_a_device(one_process: Any, name: str) -> None:
    made = builds.make(builds.EIGHT[name])
    with Counting() as counting:
        str(precision_shim.audit(*made))
    builds.step(*made)
    with counting:
        str(precision_shim.audit(*made))
    assert counting.count == 0


def test_copies_of_quantized_weights_are_counted(one_process: Any) -> None:
    chunks, optimizer = builds.make(next(iter(builds.HONEST.values())))
    before = precision_shim.audit(chunks, optimizer)
    layer = next(m for m in chunks[0].modules() if getattr(m, "weight", None) is not None)
    layer._fp8_workspaces = {"weight": layer.weight.detach().to(torch.float8_e4m3fn)}
    after = precision_shim.audit(chunks, optimizer)
    other, size = ((one.parts[0].components["other"]) for one in (before, after))
    assert size.allocated - other.allocated == layer.weight.numel()
    assert "float8_e4m3fn" in size.dtypes
    assert codes(after) == []


@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16])
def test_a_routers_bias_that_is_sent(
    one_process: Any, shim: Any, tmp_path: Path, sent: torch.dtype
) -> None:
    fields = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    chunks, _ = builds.make(builds.Build(experts=True, model=fields))
    named = {name: one for name, one in chunks[0].named_buffers() if name.endswith("expert_bias")}
    assert named
    for module in chunks[0].modules():
        if hasattr(module, "_maintain_float32_expert_bias"):
            module._maintain_float32_expert_bias()  # Megatron's own, before each forward pass
    shim(settings={"audit_dir": str(tmp_path), "log": "quiet"}, export=False)
    stream = [(name, chunks[0].get_buffer(name).to(sent)) for name in named]
    list(weight_audit.observe(stream, "verl", "actor", model=chunks))
    (found,) = [one for _, one in sent_weights.read(str(tmp_path))]
    assert isinstance(found, sent_weights.Sent)
    assert found.own["router biases"].dtypes.keys() == {"fp32"}
    codes = [code for code, _ in found.contradictions()]
    assert codes == ([] if sent is torch.float32 else ["weights-dtype"])
