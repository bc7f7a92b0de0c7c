"""verl 0.6.1, an untested version: each group of patches is made completely, or not at all."""

from __future__ import annotations

import textwrap

import pytest
from packaging.version import Version

from ..processes.commands import python
from .conftest import VERL

pytestmark = pytest.mark.skipif(
    Version("0.7") <= VERL, reason="a test of the behaviour on versions that are not pinned"
)

SCRIPT = """
import json
import precision_shim
precision_shim.install(settings={"optimizer_states": "follow-model"})
from precision_shim_tools.testing.megatron_cpu import megatron_on_cpu, model_parallel, tiny_gpt
from precision_shim_tools.testing.transformer_engine import stand_in_transformer_engine
import torch
from omegaconf import OmegaConf

with stand_in_transformer_engine("2.11.0"), megatron_on_cpu(), model_parallel():
    from verl.utils.megatron.optimizer import init_megatron_optim_config, get_megatron_optimizer
    from verl.utils.megatron_utils import get_model
    import verl.workers.megatron_workers

    found = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        provider = tiny_gpt(dtype)
        chunks = get_model(provider, transformer_config=provider.config)
        fields = dict(optimizer="adam", lr=1e-3, min_lr=0.0, clip_grad=1.0, weight_decay=0.0)
        config = OmegaConf.create({**fields, "override_optimizer_config": {
            "adam_beta2": 0.95, "exp_avg_dtype": "BF16"} if dtype is torch.bfloat16 else {}})
        made = init_megatron_optim_config(
            config, fp16=dtype is torch.float16, bf16=dtype is torch.bfloat16)
        get_megatron_optimizer(chunks, made)
        found[str(dtype)] = [str(x) for x in (
            chunks[0].buffers[0].grad_data.dtype, made.main_grads_dtype, made.exp_avg_dtype,
            made.exp_avg_sq_dtype, made.params_dtype)]
status = precision_shim.status()
groups = [(seam.feature, seam.group, seam.state) for seam in status.frameworks["verl"].seams]
status = status.to_dict()["frameworks"]["verl"]
print("RESULT " + json.dumps({"found": found, "status": status, "groups": groups}))
"""


def test_patched_whole_or_not_at_all() -> None:
    import json

    always = ("-W", "always::UserWarning:precision_shim")
    done = python(*always, "-c", textwrap.dedent(SCRIPT), timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    result = json.loads(line.removeprefix("RESULT "))
    status = result["status"]
    assert status["version"] == str(VERL)
    assert "not among the tested versions" in status["reason"]
    groups: dict[tuple[str, str], set[str]] = {}
    for feature, group, state in result["groups"]:
        groups.setdefault((feature, group), set()).add(state)
    by_feature: dict[str, set[str]] = {}
    for seam, (feature, group, state) in zip(status["seams"], result["groups"], strict=True):
        # Seams that refuse an engine, or only record verl's own behaviour, do not count as patches.
        # The patches of a worker's LM head change only models that the driver has marked.
        if (
            "engine." not in seam["target"] or "MegatronEngine.initialize" in seam["target"]
        ) and not group.endswith("LM head"):
            by_feature.setdefault(feature, set()).add(state)
    for feature, states in by_feature.items():
        halves = {"wrapped", "refused"} <= states
        assert not halves or feature == "bf16-dispatch", (feature, status["seams"])
    bf16, fp16, fp32 = (f"torch.{name}" for name in ("bfloat16", "float16", "float32"))
    for group, states in groups.items():
        assert "refused" not in states or not states & {"wrapped", "pending"}, (group, states)
    assert {states == {"refused"} for states in groups.values()} == {True, False}
    assert result["found"] == {
        bf16: [bf16, bf16, bf16, bf16, bf16],
        fp16: [fp32, fp32, fp32, fp32, fp16],
        fp32: [fp32, fp32, fp32, fp32, fp32],
    }
