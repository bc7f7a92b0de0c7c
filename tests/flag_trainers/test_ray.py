"""slime's and miles' own actors in a real Ray cluster on a CPU, in the trainers' own actor group.

Nothing in the driver calls ``install()``, and the cluster, which ran before the driver, has none of
the shim's variables: what the driver's environment has reaches the actors only through Ray. Ray
counts GPUs that do not exist.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from ..processes.rank_server import Ranks, serving
from ..processes.ray_cluster import ROOT, drive
from ..stand_ins.tiny_models import VOCABULARY, make_checkpoint

HERE = Path(__file__).parent
PAGES = ROOT / "docs" / "start"
FLAGS = f"""
    --actor-num-nodes 1 --actor-num-gpus-per-node 1 --debug-train-only --distributed-backend gloo
    --num-layers 2 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2 --seq-length 64
    --swiglu --normalization RMSNorm --norm-epsilon 1e-6 --untie-embeddings-and-output-weights
    --vocab-size {VOCABULARY} --transformer-impl local --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-rope-fusion --no-bias-swiglu-fusion
    --custom-model-provider-path tests.flag_trainers.cpu.make_model --data-pad-size-multiplier 1
    --micro-batch-size 2 --global-batch-size 4 --rollout-batch-size 4 --n-samples-per-prompt 1
    --lr 0.01 --lr-decay-style constant --advantage-estimator grpo --disable-rewards-normalization
    --disable-rollout-global-dataset --fp16 --hysteresis 1 --accumulate-allreduce-grads-in-fp32
"""
SCALE = 32768
OVERFLOW = 1e30
pytestmark = [pytest.mark.usefixtures("start_up_file"), pytest.mark.timeout(1000)]
drivers = serving("tests.verl.ray_processes")


def steps(found: dict[str, Any]) -> list[dict[str, float]]:
    """The figures that the trainer logs after each step."""
    number = r"'train/(grad_norm|loss_scale|skipped_steps)': (nan|[-+.e\d]+)"
    lines = [line for line in found["heard"] if line.startswith("step ")]
    return [{key: float(value) for key, value in re.findall(number, line)} for line in lines]


def promised(name: str) -> str:
    """The line that rank 0 logs by the trainer's start page."""
    page = (PAGES / f"{name}.md").read_text()
    line = page[page.index(f"[precision_shim] {name} actor: fp16-scaling") :]
    return " ".join(line[: line.index("\n\n")].split())


def test_the_variable_reaches_the_actor(name: str, tmp_path: Path, drivers: Ranks) -> None:
    model = str(make_checkpoint(tmp_path / "model"))
    flags = [*FLAGS.split(), "--hf-checkpoint", model, "--ref-load", model]
    job = json.dumps({"rewards": [1, OVERFLOW, 1], "flags": flags})
    sites = (HERE / "site",)
    driver = (drivers, HERE / "ray_driver.py", name, tmp_path, job)
    found = drive(*driver, paths=sites, timeout=900, PRECISION_SHIM="1")

    assert found["variables"]["PRECISION_SHIM"] == "1"
    assert found["asked"] == [f"{name}.backends.megatron_utils.actor.MegatronTrainRayActor"]
    driven = ("ray.placement_group", "sglang_utils")  # the actor need not import these
    states = {key: one for key, one in found["states"].items() if not any(map(key.count, driven))}
    assert set(states.values()) == {"wrapped"}
    assert all(found["patched"].values()), found["patched"]
    assert promised(name) in found["log"]
    first, skipped, last = steps(found)
    assert (first["loss_scale"], first["skipped_steps"]) == (SCALE, 0)
    assert (skipped["loss_scale"], skipped["skipped_steps"]) == (SCALE, 1)
    assert math.isnan(skipped["grad_norm"])
    assert (last["loss_scale"], last["skipped_steps"]) == (SCALE / 2, 1)
    assert math.isfinite(last["grad_norm"])
