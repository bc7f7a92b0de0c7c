"""Whole GRPO runs with the shim and without, stopped and resumed; and the engine's weights.

Every answer is sampled with its own seed (``seeded.py``), so two jobs can be compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from precision_shim.auditing import sent_weights

from ..processes.commands import command
from .conftest import Ran

FP16, BF16 = "float16", "bfloat16"
BEFORE, AFTER = 2.0**26, 2.0**14
"""The initial loss scale, which overflows on every machine, and the scale after one overflow."""
SCALER = {
    "PRECISION_SHIM_LOSS_SCALE_INIT": str(BEFORE),
    "PRECISION_SHIM_BACKOFF_FACTOR": str(AFTER / BEFORE),
    "PRECISION_SHIM_GROWTH_INTERVAL": "2",
}
STRICT = {"PRECISION_SHIM": "strict"}
HEAD = {"PRECISION_SHIM_HEAD": "fp32"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def audits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audits")


@pytest.fixture(scope="module")
def whole(ran: Callable[..., Ran], checkpoints: Path, audits: Path) -> Ran:
    """Trainer and rollout in fp16, their LM heads in fp32, four steps, saved after two; audited."""
    keys = ("trainer.save_freq=2", f"trainer.default_local_dir={checkpoints}")
    audited = {"PRECISION_SHIM_AUDIT_DIR": str(audits)}
    return ran("fp16", "fp16", 4, *keys, **STRICT, **SCALER, **HEAD, **audited)


@pytest.fixture(scope="module")
def resumed(ran: Callable[..., Ran], whole: Ran, checkpoints: Path, tmp_path_factory: Any) -> Ran:
    """The run ``whole``, resumed from its save."""
    keys = (
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={checkpoints / 'global_step_2'}",
        f"trainer.default_local_dir={tmp_path_factory.mktemp('other')}",
    )
    return ran("fp16", "fp16", 4, *keys, **STRICT, **SCALER, **HEAD)


@pytest.fixture(scope="module")
def alone(ran: Callable[..., Ran]) -> Ran:
    """verl without the shim; trainer and rollout in bf16."""
    return ran("bf16", "bf16", 2, PRECISION_SHIM="0")


@pytest.fixture(scope="module")
def beside(ran: Callable[..., Ran]) -> Ran:
    """The run ``alone`` with the shim under strict."""
    return ran("bf16", "bf16", 2, **STRICT)


def in_the_engine(sent: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The trainer's weights, rounded once, and joined under vLLM's names."""
    import torch

    joined: dict[str, Any] = {}
    for name, weight in sent.items():
        for part, whole in (
            *((f".{one}_proj.", ".qkv_proj.") for one in "qkv"),
            *((f".{one}_proj.", ".gate_up_proj.") for one in ("gate", "up")),
        ):
            if part in name:
                name = name.replace(part, whole)  # noqa: PLW2901
                break
        joined.setdefault(name, []).append(weight.to(getattr(torch, dtype)))
    return {name: torch.cat(parts) for name, parts in joined.items()}


def same_weights(held: dict[str, Any], expected: dict[str, Any]) -> None:
    import torch

    assert held.keys() == expected.keys()
    for name, weight in expected.items():
        assert held[name].dtype == weight.dtype, name
        own, padded = held[name][: len(weight)], held[name][len(weight) :]
        assert torch.equal(own, weight), name
        assert not padded.any(), name  # vLLM pads the vocabulary


@pytest.mark.parametrize(
    ("job", "dtype"),
    [
        ("whole", FP16),
        pytest.param("alone", BF16, marks=pytest.mark.slow),
        pytest.param("beside", BF16, marks=pytest.mark.slow),
    ],
)
def test_the_engine_holds_the_trainers_weights_rounded_once(
    request: pytest.FixtureRequest, job: str, dtype: str
) -> None:
    done: Ran = request.getfixturevalue(job)
    sent, held = done.weights("trainer"), done.weights("engine")
    assert len(sent) == len(held) >= len(done.metrics)
    for ours, theirs in zip(sent, held, strict=True):
        same_weights(theirs, in_the_engine(ours, dtype))


def test_steps_that_overflow_are_skipped_and_the_weights_stay(whole: Ran) -> None:
    scales = [step["actor/loss_scale"] for step in whole.metrics.values()]
    skipped = [step["actor/skipped_steps"] for step in whole.metrics.values()]
    assert scales == [BEFORE, AFTER, AFTER, 2 * AFTER]
    assert skipped == [1] * 4
    first, second, third = whole.weights("engine")[:3]
    same_weights(second, first)
    with pytest.raises(AssertionError):
        same_weights(third, second)


def test_resumed_in_the_middle_the_run_is_the_same_bit_for_bit(whole: Ran, resumed: Ran) -> None:
    assert list(whole.metrics) == [1, 2, 3, 4]
    assert list(resumed.metrics) == [3, 4]
    for step, metrics in resumed.metrics.items():
        assert metrics == whole.metrics[step]
    same_weights(resumed.weights("engine")[-1], whole.weights("engine")[-1])


@pytest.mark.slow
def test_where_nothing_is_asked_of_it_the_shim_changes_nothing(alone: Ran, beside: Ran) -> None:
    assert "precision_shim" not in alone.log
    assert "precision_shim" in beside.log
    assert beside.metrics == alone.metrics
    for ours, theirs in zip(beside.weights("engine"), alone.weights("engine"), strict=True):
        same_weights(ours, theirs)


def test_the_audit_has_the_sent_weights_and_finds_no_contradiction(
    whole: Ran, audits: Path
) -> None:
    ((_, sent),) = sent_weights.read(str(audits))
    assert isinstance(sent, sent_weights.Sent)
    assert (sent.framework, sent.subject, sent.asked) == ("verl", "actor", FP16)
    assert sent.sync > 1
    assert sent.sent["weights"].dtypes.keys() == {"fp32"}  # the masters, which the engine rounds
    assert sent.head == "fp32"
    ended = command("audit", audits)
    assert (ended.code, "no problems" in ended.out) == (0, True), ended


def test_the_lm_head_in_fp32_in_trainer_and_engine(whole: Ran) -> None:
    """The driver writes both keys; the worker says what its LM head computes in."""
    assert "LM head: rollout-agreement: fp32 in trainer and rollout" in whole.log


PAIRS = [(trainer, rollout) for trainer in ("fp16", "bf16", "fp32") for rollout in
         ("fp16", "bf16", "fp32")]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("trainer", "rollout"), PAIRS)
def test_nine_pairs(ran: Callable[..., Ran], trainer: str, rollout: str) -> None:
    """Each pair trains, and the engine has the masters, rounded once to its own dtype."""
    done = ran(trainer, rollout, 2, PRECISION_SHIM="1")
    dtype = {"fp16": FP16, "bf16": BF16, "fp32": "float32"}[rollout]
    assert len(done.metrics) == 2
    same_weights(done.weights("engine")[-1], in_the_engine(done.weights("trainer")[-1], dtype))
    assert ("the mismatch that fp16" in done.log) == ((trainer, rollout) == ("fp16", "bf16"))
