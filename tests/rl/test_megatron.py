"""Whole GRPO runs with verl's Megatron engine as the trainer, and the real vLLM: both sides.

The jobs in fp16 have two ranks and a vLLM each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from precision_shim.auditing import sent_weights

from ..processes.commands import command
from . import megatron_on_cpu
from .conftest import ROLLOUT, Probed, Ran
from .test_runs import STRICT, same_weights

pytestmark = pytest.mark.slow

RANKS = 2
BEFORE, AFTER = 2.0**26, 2.0**10
"""The first scale, which overflows on any machine, and what Megatron makes of it at the second
overflow: its hysteresis is 2."""
SCALER = {
    "PRECISION_SHIM_LOSS_SCALE_INIT": str(BEFORE),
    "PRECISION_SHIM_BACKOFF_FACTOR": str(AFTER / BEFORE),
    "PRECISION_SHIM_GROWTH_INTERVAL": "2",
}
STEPS, SAVED = 5, 3
"""Two steps that overflow and three that are taken; saved with no tracker at its start."""
ON_TWO_RANKS = (
    f"trainer.n_gpus_per_node={RANKS}",
    f"ray_kwargs.ray_init.num_gpus={RANKS}",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=8",
)
IN_VLLM = {
    "embedding.word_embeddings.": "model.embed_tokens.",
    "decoder.final_layernorm.": "model.norm.",
    "output_layer.": "lm_head.",
    "decoder.layers.": "model.layers.",
    ".pre_mlp_layernorm.": ".post_attention_layernorm.",
    ".self_attention.linear_qkv.": ".self_attn.qkv_proj.",
    ".self_attention.linear_proj.": ".self_attn.o_proj.",
    ".mlp.linear_fc1.": ".mlp.gate_up_proj.",
    ".mlp.linear_fc2.": ".mlp.down_proj.",
}
"""Megatron's names and vLLM's, whose joined weights have one layout where keys have one head."""


@dataclass(frozen=True)
class OnMegatron(Probed):
    """A job whose trainer is verl's Megatron engine, with Megatron-Bridge, verl's default."""

    def engine_keys(self) -> dict[str, object]:
        """The keys of the trainer's engine."""
        dtype = {"fp16": "float16", "bf16": "bfloat16"}[self.trainer]
        return megatron_on_cpu.keys(dtype)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders that outlast a job."""
    return {one: tmp_path_factory.mktemp(one) for one in ("checkpoints", "other", "whole")}


@pytest.fixture(scope="module")
def fp16(ran: Callable[..., Ran]) -> Callable[..., Ran]:
    """Run a job with fp16 on both sides, on two ranks."""

    def run(*keys: str, **variables: str) -> Ran:
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(RANKS)))}
        given = {**STRICT, **SCALER, **devices, **variables}
        return ran("fp16", "fp16", STEPS, *ON_TWO_RANKS, *keys, kind=OnMegatron, **given)

    return run


@pytest.fixture(scope="module")
def whole(fp16: Callable[..., Ran], places: dict[str, Path]) -> Ran:
    """fp16 on both sides, saved in the middle; audited."""
    keys = (f"trainer.save_freq={SAVED}", f"trainer.default_local_dir={places['checkpoints']}")
    return fp16(*keys, PRECISION_SHIM_AUDIT_DIR=str(places["whole"]))


@pytest.fixture(scope="module")
def resumed(fp16: Callable[..., Ran], whole: Ran, places: dict[str, Path]) -> Ran:
    """The same, begun from the save."""
    return fp16(
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={places['checkpoints'] / f'global_step_{SAVED}'}",
        f"trainer.default_local_dir={places['other']}",
    )


def in_vllm(sent: dict[str, Any]) -> dict[str, Any]:
    """Megatron's weights under vLLM's names."""
    named = {}
    for name, weight in sent.items():
        for ours, theirs in IN_VLLM.items():
            name = name.replace(ours, theirs)  # noqa: PLW2901
        named[name] = weight
    return named


def test_each_engine_holds_the_trainers_weights(whole: Ran) -> None:
    for rank in range(RANKS):
        sent, held = whole.weights("trainer", rank), whole.weights("engine", rank)
        assert len(sent) == len(held) > len(whole.metrics)
        for ours, theirs in zip(sent, held, strict=True):
            assert {str(one.dtype) for one in ours.values()} == {"torch.float16"}
            same_weights(theirs, in_vllm(ours))


def test_steps_that_overflow_are_skipped_on_all_ranks(whole: Ran) -> None:
    column = {name: [step[f"actor/{name}"] for step in whole.metrics.values()]
              for name in ("loss_scale", "skipped_steps", "grad_norm")}  # fmt: skip
    assert column["loss_scale"] == [BEFORE, BEFORE, AFTER, AFTER, 2 * AFTER]
    assert column["skipped_steps"] == [1, 2, 2, 2, 2]
    assert [norm is not None for norm in column["grad_norm"]] == [False] * 2 + [True] * 3
    for rank in range(RANKS):
        before, first, second, third = whole.weights("engine", rank)[:4]
        same_weights(first, before)
        same_weights(second, before)
        with pytest.raises(AssertionError):
            same_weights(third, before)


def kinds(held: dict[str, Any]) -> dict[str, str]:
    """The dtypes of a rank's states, by their kind."""
    found: dict[str, set[str]] = {}
    for name, one in held["states"].items():
        found.setdefault(name.partition(".")[2], set()).add(str(one.dtype).removeprefix("torch."))
    return {name: " ".join(sorted(dtypes)) for name, dtypes in found.items()}


def test_what_fp16s_workers_hold(whole: Ran) -> None:
    for rank in range(RANKS):
        *_, held = whole.weights("optimizer", rank)
        assert held["precision-aware"]
        assert held["buckets"] == held["main grads"] == ["torch.float32"]
        assert kinds(held) == {
            "stepped": "float16", "master_param": "float32", "exp_avg": "float32",
            "exp_avg_sq": "float32",
        }  # fmt: skip
        states = held["states"]
        for name, master in states.items():
            number, _, kind = name.partition(".")
            if kind == "master_param":
                assert (states[f"{number}.stepped"] == master.half()).all()
                assert (states[f"{number}.stepped"] != master).any()
        scaler = held["scaler"]
        assert float(scaler.pop("scale")) == 2 * AFTER
        assert scaler == {"growth_tracker": 1, "hysteresis_tracker": 2}


def audited(folder: Path) -> list[sent_weights.Sent]:
    """The records of the sent weights, after the command has found no contradiction."""
    ended = command("audit", folder)
    assert (ended.code, "no problems" in ended.out) == (0, True), ended
    read = [half for _, half in sent_weights.read(str(folder))]
    return [half for half in read if isinstance(half, sent_weights.Sent)]


def test_the_audit_has_the_sent_weights_and_finds_no_contradiction(
    whole: Ran, places: dict[str, Path]
) -> None:
    sent = audited(places["whole"])
    assert sorted(half.rank for half in sent) == list(range(RANKS))
    for half in sent:
        assert (half.framework, half.subject) == ("verl", "actor")
        assert {name for one in half.sent.values() for name in one.dtypes} == {"fp16"}


def test_the_lm_head_in_fp32_in_trainer_and_engine(ran: Callable[..., Ran], tmp_path: Path) -> None:
    """Megatron's output layer computes in fp32, and the driver writes vLLM's key."""
    audit = {"PRECISION_SHIM_AUDIT_DIR": str(tmp_path)}
    done = ran("bf16", "bf16", 2, kind=OnMegatron, **audit, **STRICT, PRECISION_SHIM_HEAD="fp32")
    assert "LM head: rollout-agreement: fp32 in trainer and rollout" in done.log
    (sent,) = audited(tmp_path)
    assert sent.head == "fp32"
    assert len(done.metrics) == 2


def test_resumed_in_the_middle_the_run_is_the_same_bit_for_bit(whole: Ran, resumed: Ran) -> None:
    assert list(whole.metrics) == list(range(1, STEPS + 1))
    assert list(resumed.metrics) == list(range(SAVED + 1, STEPS + 1))
    skips = "actor/skipped_steps"  # on Megatron, since the process started
    for step, metrics in resumed.metrics.items():
        assert (metrics.pop(skips), whole.metrics[step][skips]) == (0, 2)
        assert metrics == {k: v for k, v in whole.metrics[step].items() if k != skips}
    for rank in range(RANKS):
        for side in ("engine", "trainer"):
            same_weights(resumed.weights(side, rank)[-1], whole.weights(side, rank)[-1])
        (one, other) = (done.weights("optimizer", rank)[-1] for done in (resumed, whole))
        same_weights(one.pop("states"), other.pop("states"))
        assert one == other
        assert one["steps"] == [STEPS - 2] * 2
