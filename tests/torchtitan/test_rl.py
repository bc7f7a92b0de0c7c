"""The RL trainer in float16, through its own ``__init__`` and its own endpoints."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import precision_shim
from precision_shim.errors import PrecisionShimWarning

from . import by_hand, cpu

OVERFLOWS = (2, 5)
STEPS = 8
SETTINGS = {"growth_interval": 2, "loss_scale_init": 1024}


def advantage(step: int) -> float:
    return 1e9 if step in OVERFLOWS else 1.0


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def finite(trainer: Any) -> bool:
    return all(bool(torch.isfinite(one).all()) for one in cpu.values(trainer).values())


def decisions() -> list[str]:
    found = precision_shim.status().decisions
    return [f"{one.subject}: {one.chosen}" for one in found if one.framework == "torchtitan"]


def gradients(trainer: Any, size: float) -> torch.Tensor:
    """The gradients after the backward pass of a step with advantages of the given size."""
    for part in range(3):
        data = [cpu.microbatch(part, advantage=size)]
        cpu.endpoint(trainer, "forward_backward", data, 6 * cpu.LENGTH)
    found = [cpu.local(one.grad).flatten() for one in trainer.model.parameters()]
    return torch.cat(found)


# -- with the shim -----------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [None, 2], ids=["plain", "chunked"])
def test_it_is_the_loop_by_hand_bit_for_bit(policy: Any, shim: Any, chunks: int | None) -> None:
    """Each of eight steps: three ``forward_backward``, one ``optim_step``; two steps overflow."""
    with by_hand.attention_in_float16():
        hand = policy(chunks=chunks)
    scaler = by_hand.scaler(1024.0, 2)
    expected = [by_hand.policy_step(hand, scaler, step, advantage(step)) for step in range(STEPS)]
    expected_values = cpu.values(hand)

    shim(settings=SETTINGS)
    trainer = policy(chunks=chunks)
    skipped = 0
    for step, (norm, scale, loss) in enumerate(expected):
        metrics, output = cpu.policy_step(trainer, step, advantage(step))
        skipped += step in OVERFLOWS
        reported = output.metrics["trainer/grad_norm/mean"]
        assert isinstance(reported, float)
        assert math.isnan(reported) if step in OVERFLOWS else reported == norm
        assert metrics["loss/mean"] == loss
        assert output.metrics["trainer/loss_scale"] == scale
        assert output.metrics["trainer/skipped_steps"] == skipped
        assert output.policy_version == trainer.policy_version == step + 1
    assert [scale for _, scale, _ in expected] == [1024, 1024, 2048, 1024, 1024, 2048, 1024, 1024]
    assert equal(cpu.values(trainer), expected_values)
    assert trainer.lr_schedulers.state_dict() == hand.lr_schedulers.state_dict()


@pytest.mark.parametrize(("dtype", "chunks"), [("bfloat16", 2), ("float32", None)])
def test_other_dtypes_are_left_alone(
    policy: Any, shim: Any, dtype: str, chunks: int | None
) -> None:
    def train() -> tuple[list[Any], dict[str, Any]]:
        trainer = policy(dtype, chunks=chunks)
        found = [cpu.policy_step(trainer, step) for step in range(2)]
        return [(metrics, output) for metrics, output in found], cpu.values(trainer)

    expected, values = train()
    shim()
    found, ours = train()
    assert found == expected
    assert equal(ours, values)
    assert not decisions()


def test_attention_is_in_the_models_dtype(policy: Any, shim: Any) -> None:
    def dtypes(dtype: str) -> set[torch.dtype]:
        cpu.SEEN.clear()
        cpu.policy_step(policy(dtype), 0, parts=1)
        return set(cpu.SEEN)

    assert dtypes("float16") == {torch.bfloat16}
    shim()
    assert dtypes("float16") == {torch.float16}
    assert dtypes("bfloat16") == dtypes("float32") == {torch.bfloat16}
    precision_shim.uninstall()
    assert dtypes("float16") == {torch.bfloat16}


def test_decisions(policy: Any, shim: Any) -> None:
    shim(settings={"loss_scale_init": 4096})
    policy(experts=True, generator_dtype="bf16")
    said = decisions()
    assert "policy: grouped experts in bfloat16" in said
    assert "policy: varlen attention in float16" in said
    assert "rollout: bf16 beside the policy's fp16" in said
    assert any("loss scaling from 4096" in one for one in said)


@pytest.mark.parametrize("method", ["optim_step", "forward_backward", "_build_model"])
def test_a_subclass_with_its_own_loop_is_refused_by_name(
    torchtitan: None, shim: Any, tmp_path: Any, method: str
) -> None:
    """A subclass's own step would not unscale; a subclass's own loss would not be scaled."""
    from monarch.actor import concurrent_endpoint
    from torchtitan.config import CompileConfig
    from torchtitan.experiments.rl.actors.trainer import PolicyTrainer

    held = vars(PolicyTrainer)[method]
    own = held if method == "_build_model" else held._method.__wrapped__

    async def endpoint(self: Any, *args: Any) -> Any:
        return await own(self, *args)

    def build_model(self: Any, *args: Any) -> Any:
        return own(self, *args)

    if method == "_build_model":
        found: Any = build_model
    else:
        endpoint.__name__ = method
        found = concurrent_endpoint(endpoint)
    kind = type("Own", (PolicyTrainer,), {method: found})

    def build(dtype: str = "float16") -> Any:
        return kind(
            cpu.policy_config(tmp_path, dtype),
            model_spec=cpu.model_spec(),
            compile_config=CompileConfig(),
            output_dir=str(tmp_path),
        )

    shim()
    with pytest.warns(PrecisionShimWarning, match=f"Own has its own {method}"):
        trainer = build()
    assert not [one for one in decisions() if "loss scaling" in one]
    metrics, output = cpu.policy_step(trainer, 0, parts=1)
    assert "trainer/loss_scale" not in output.metrics
    assert math.isfinite(metrics["loss/mean"])
    build("bfloat16")
    shim(strict=True)
    with pytest.raises(precision_shim.PrecisionShimError, match=f"Own has its own {method}"):
        build()


def test_two_trainers_in_one_process(policy: Any, shim: Any) -> None:
    """Each trainer has its own scaler, even if one makes gradients before the other steps."""
    shim(settings=SETTINGS)
    alone = policy()
    cpu.policy_step(alone, 0, parts=1)
    cpu.policy_step(alone, 1, parts=1)

    def forward_backward(trainer: Any, step: int, size: float = 1.0) -> None:
        batch = [cpu.microbatch(1000 * step, advantage=size)]
        cpu.endpoint(trainer, "forward_backward", batch, 2 * cpu.LENGTH)

    first, second = policy(), policy()
    found = []
    for step in range(2):
        forward_backward(first, step)
        forward_backward(second, step, 1e9)
        found.append([cpu.endpoint(one, "optim_step").metrics for one in (first, second)])
    assert equal(cpu.values(first), cpu.values(alone))
    skips = [[one["trainer/skipped_steps"] for one in both] for both in found]
    assert skips == [[0.0, 1.0], [0.0, 2.0]]
    assert [one["trainer/loss_scale"] for one in found[1]] == [1024.0, 512.0]
