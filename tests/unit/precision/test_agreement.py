"""Whether two engines of a job agree in their dtypes, for all pairs."""

from __future__ import annotations

import itertools

import pytest

from precision_shim.precision.agreement import AUTO, ENGINE_NAMES, FP8, Engine, compare

DTYPES = tuple(ENGINE_NAMES)
PAIRS = list(itertools.product(DTYPES, (*DTYPES, AUTO, FP8)))


def engine(subject: str, computes: str, **fields: object) -> Engine:
    return Engine(subject, computes, f"{subject}.dtype", **fields)


@pytest.mark.parametrize(("trainer", "other"), PAIRS)
@pytest.mark.parametrize("subject", ["rollout", "ref"])
def test_pairs(subject: str, trainer: str, other: str) -> None:
    found = compare(engine("actor", trainer), engine(subject, other))
    assert found.lost is (trainer == "fp16" and other == "bf16")
    assert f"{subject}.dtype" in found.because
    if trainer == other:
        assert (found.chosen, found.remedy) == (f"{other}, as the actor", "")
        return
    assert found.chosen.endswith(f"beside the actor's {trainer}")
    wanted = "" if other == FP8 else f"{subject}.dtype={ENGINE_NAMES[trainer]}"
    assert found.remedy == wanted
    kept = "the mismatch that fp16 removes stays" in found.because
    assert kept is (found.lost and subject == "rollout")


def test_an_engine_without_a_key_has_no_line_to_write() -> None:
    found = compare(engine("actor", "fp16"), Engine("ref", "bf16", "", because="it autocasts"))
    assert (found.remedy, found.lost) == ("", True)
    assert found.because.startswith("it autocasts: ")


@pytest.mark.parametrize(("trainer", "other"), PAIRS)
def test_an_engine_that_keeps_values_in_fewer_bits_never_agrees(trainer: str, other: str) -> None:
    plain = engine("rollout", other)
    found, before = (
        compare(engine("actor", trainer), one)
        for one in (engine("rollout", other, rounded=("fp8 KV cache", "cache=fp8")), plain)
    )
    assert (found.lost, found.remedy) == (before.lost, before.remedy)
    assert found.chosen.endswith(f"with fp8 KV cache beside the actor's {trainer}")
    assert found.because.startswith(f"{before.because}; cache=fp8: ")


def test_an_engine_that_refuses_the_model_in_fp16() -> None:
    trainer, refuses = engine("actor", "fp16"), "it refuses gemma2"
    same = compare(trainer, engine("rollout", "fp16", refuses=refuses))
    assert (same.chosen, same.lost, same.remedy) == ("fp16", True, "")
    assert same.because == refuses
    other = compare(engine("actor", "bf16"), engine("rollout", "fp16", refuses=refuses))
    assert (other.lost, other.remedy) == (True, "rollout.dtype=bfloat16")
    lower = compare(trainer, engine("rollout", "bf16", refuses=refuses))
    assert (lower.lost, lower.remedy) == (True, "")
    low = compare(engine("actor", "bf16"), engine("rollout", "bf16", refuses=refuses))
    assert low.chosen == "bf16, as the actor"
