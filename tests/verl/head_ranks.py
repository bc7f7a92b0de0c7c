"""Cases of the ranks in ``fsdp_ranks.py``: the LM head in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from . import fsdp_support as support
from .fsdp_ranks import SETTINGS, Job, case, install

MARK = {"head_dtype": "float32"}


def watch(module: Any) -> list[dict[str, Any]]:
    """Compare each forward of a model's LM head with a product in fp32 of rounded values."""
    seen: list[dict[str, Any]] = []

    head = module.lm_head
    own = head.forward

    def forward(given: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = own(given)  # FSDP shards the weight again after the forward
        dtype = torch.get_autocast_dtype("cpu")  # 0.7.1's engine: bfloat16, whatever its keys say
        hidden, weight = given.to(dtype).float(), head.weight.to(dtype).float()
        with torch.autocast("cpu", enabled=False):
            product = functional.linear(hidden, weight)
        seen.append({"dtype": str(logits.dtype), "exact": torch.equal(logits, product)})
        return logits

    head.forward = forward
    return seen


@case
def fp32_head(job: Job, head: str, role: str = "actor") -> dict[str, Any]:
    """Train with an overflow, save, load and go on; the LM head is watched."""
    install(**SETTINGS, head=head)
    options: dict[str, Any] = {"overrides": MARK if head == "fp32" else {}}
    if role == "ref":
        one = support.engine(job.model, forward_only=True, **options)
        return {"own": "forward" in vars(one.module.lm_head)}
    if role == "critic":
        one = support.engine(job.value_model, critic=True, **options)
        return {"own": any("forward" in vars(part) for part in one.module.modules())}
    one = support.engine(job.model, lora=role == "lora", **options)
    seen = watch(one.module.base_model.model if role == "lora" else one.module)
    said = support.train(one, range(4), {1: support.HUGE, 3: support.HUGE})
    two = support.engine(job.model, lora=role == "lora", **options)
    support.train(two, range(2), {1: support.HUGE})
    two.save_checkpoint(job.path(f"{head}-{role}"), global_step=2)
    three = support.engine(job.model, lora=role == "lora", **options)
    three.load_checkpoint(job.path(f"{head}-{role}"), del_local_after_load=False)
    again = support.train(three, range(2, 4), {3: support.HUGE})
    return {
        "seen": seen,
        "said": said[2:],
        "again": again,
        "straight": support.engine_state(one),
        "resumed": support.engine_state(three),
        "saved": {
            path.name: "head_dtype" in path.read_text()
            for path in Path(job.path(f"{head}-{role}")).rglob("*.json")
        },
    }


@case
def legacy_fp32_head(job: Job, head: str) -> dict[str, Any]:
    """The LM head of 0.7.1's legacy actor."""
    install(**SETTINGS, head=head)
    key = "++actor_rollout_ref.model.override_config.head_dtype=float32"
    one = support.Legacy(job.model, "actor", *([key] if head == "fp32" else []))
    seen = watch(one.module)
    one.train(range(2), {1: support.HUGE})
    return {"seen": seen}
