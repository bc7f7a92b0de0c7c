"""The report on a job's engines, the dtypes that are written into configs, and dtype names."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import precision_shim
from precision_shim.errors import DtypeError, PrecisionShimWarning, UnsupportedPrecisionError
from precision_shim.precision.agreement import AUTO, FP8, Engine
from precision_shim.process.settings import resolve
from precision_shim.reporting import journal
from precision_shim_adapters.agreement.names import engine_name, with_rounded, write_key
from precision_shim_adapters.agreement.report import Sides, Write, report_sides

JOB = "toyfw", "toyfw 1.0"
WHERE = JOB[1]
NAMES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
TRAINER = {one: Engine("actor", one, "actor.dtype") for one in ("fp16", "bf16", "fp32")}


def rollout(computes: str, **fields: Any) -> Engine:
    return Engine("rollout", computes, "rollout.dtype", NAMES.get(computes, computes), **fields)


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    journal.clear()
    yield
    precision_shim.uninstall()


def report_engines(trainer: str, others: list[Engine], write: Write | None) -> None:
    report_sides(Sides(*JOB, TRAINER[trainer], others), write)


def decided() -> list[str]:
    return [one.chosen for one in precision_shim.status().decisions]


CASES = list(itertools.product(TRAINER, ("fp16", "bf16", "fp32", AUTO, FP8)))


@pytest.mark.parametrize(("trainer", "computes"), CASES)
@pytest.mark.parametrize("setting", ["tell", "follow"])
def test_follow_writes_whatever_stands_there(setting: str, trainer: str, computes: str) -> None:
    precision_shim.install(settings={"rollout": setting, "log": "quiet"})
    wrote: list[tuple[str, str]] = []
    asked = trainer, [rollout(computes)]
    follows = setting == "follow" and computes not in (trainer, FP8)
    lost = trainer == "fp16" and computes == "bf16" and not follows

    def act() -> None:
        report_engines(*asked, lambda key, name: wrote.append((key, name)))

    if lost:
        with pytest.warns(PrecisionShimWarning, match=r"toyfw 1.0: the actor computes in fp16"):
            act()
    else:
        act()
    assert wrote == ([("rollout.dtype", NAMES[trainer])] if follows else [])
    *keys, chosen = decided()
    replaced = f"rollout.dtype: {NAMES.get(computes, computes)} -> {NAMES[trainer]}"
    assert keys == [replaced] * follows
    assert ("as the actor" in chosen) is (follows or computes == trainer)
    settings = resolve(settings={"rollout": setting}, environ={})
    sides = Sides(*JOB, TRAINER[trainer], asked[1])
    planned, _ = sides.judge(settings, may_write=True, here=False)
    assert bool(planned.problems) is lost
    assert planned.decisions == precision_shim.status().decisions


def test_doubt_is_a_note_that_says_how_to_find_out() -> None:
    precision_shim.install(strict=True, settings={"log": "quiet"})
    report_engines("fp16", [rollout(AUTO)], None)
    (one,) = precision_shim.status().decisions
    assert one.chosen == "the checkpoint's dtype beside the actor's fp16"
    assert "not known here; the engine's own log names it, and rollout.dtype=float16 sets it" in (
        one.because
    )


def test_one_decision_has_all_keys_that_follow_replaces() -> None:
    precision_shim.install(strict=True, settings={"rollout": "follow", "log": "quiet"})
    others = [
        Engine("ref", "bf16", "ref.dtype"),
        rollout("bf16"),
        Engine("teacher", "bf16", ""),  # no key sets its dtype
        Engine("teacher", "fp32", "teacher.dtype", "float32", follows=False),
    ]
    with pytest.raises(UnsupportedPrecisionError, match="Train in bf16"):
        report_engines("fp16", others, lambda key, name: None)
    first = precision_shim.status().decisions[0]
    assert first.subject == "dtype keys"
    assert first.chosen == "ref.dtype: not set -> float16; rollout.dtype: bfloat16 -> float16"
    assert first.because == "PRECISION_SHIM_ROLLOUT=follow"
    assert decided()[1:3] == ["fp16, as the actor"] * 2


def test_a_model_that_vllm_refuses_in_fp16_does_not_follow() -> None:
    precision_shim.install(settings={"rollout": "follow", "log": "quiet"})
    others = [rollout("bf16", refuses="it refuses gemma2"), Engine("ref", "bf16", "ref.dtype")]
    wrote: list[str] = []
    with pytest.warns(PrecisionShimWarning, match="Train in bf16"):
        report_engines("fp16", others, lambda key, _: wrote.append(key))
    assert wrote == ["ref.dtype"]


def test_strict_raises_with_every_engine_that_disagrees() -> None:
    precision_shim.install(strict=True, settings={"log": "quiet"})
    ref = Engine("ref", "bf16", "ref.dtype")
    with pytest.raises(UnsupportedPrecisionError) as caught:
        report_engines("fp16", [ref, rollout("bf16")], lambda key, name: None)
    text = str(caught.value)
    assert "Write ref.dtype=float16" in text
    assert "Write rollout.dtype=float16" in text
    assert len(decided()) == 2  # status() has them, too


def test_strict_lets_a_bf16_trainers_choice_pass() -> None:
    precision_shim.install(strict=True, settings={"log": "quiet"})
    report_engines("bf16", [rollout("fp16")], None)
    assert decided() == ["fp16 beside the actor's bf16"]


def test_nothing_is_written_where_the_config_was_copied() -> None:
    precision_shim.install(settings={"rollout": "follow", "log": "quiet"})
    with pytest.warns(PrecisionShimWarning):
        report_engines("fp16", [rollout("bf16")], None)
    assert decided() == ["bf16 beside the actor's fp16"]


def test_what_was_written_is_not_said_twice() -> None:
    precision_shim.install(settings={"rollout": "follow", "log": "quiet"})
    report_engines("fp16", [rollout("bf16")], lambda key, name: None)
    report_engines("fp16", [rollout("fp16")], lambda key, name: None)
    assert decided() == ["rollout.dtype: bfloat16 -> float16", "fp16, as the actor"]


def test_the_plan_writes_nothing_where_the_feature_is_off() -> None:
    settings = resolve(settings={"rollout": "follow"}, environ={})
    sides = Sides(*JOB, TRAINER["fp16"], [rollout("bf16")])
    found, writes = sides.judge(settings, may_write=True)
    assert (found.problems, writes) == ((), {"rollout.dtype": "float16"})
    found, writes = sides.judge(settings, may_write=False)
    ((problem,), expected) = found.problems, {}
    assert writes == expected
    assert (problem.code, problem.key) == ("rollout-dtype", "rollout.dtype")
    assert problem.remedy.startswith("Write rollout.dtype=float16")


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("fp16", "float16"),
        (" Half ", "float16"),
        ("torch.bfloat16", "bfloat16"),
        ("BF16", "bfloat16"),
        ("float", "float32"),
        (torch.float32, "float32"),
        ("auto", "auto"),
    ],
)
def test_names(value: object, name: str) -> None:
    assert engine_name(value, "rollout.dtype", WHERE) == name


@pytest.mark.parametrize("value", ["fp8", "flaot16", "", None, "int8", torch.int8, "fp64"])
def test_wrong_names(value: object) -> None:
    with pytest.raises(DtypeError, match=r"toyfw 1.0: rollout.dtype=.*allowed: .*; and auto"):
        engine_name(value, "rollout.dtype", WHERE)
    assert engine_name("fp8", "p", WHERE, also=("auto", "fp8")) == "fp8"


def test_keys_are_written_into_mappings_and_objects() -> None:
    made = SimpleNamespace(kwargs=None, inner={"dtype": "bfloat16", "rest": SimpleNamespace()})
    write_key(made, "kwargs.overrides.head", "float32")
    write_key(made, "inner.dtype", "float16")
    write_key(made, "inner.rest.dtype", "float32")
    assert made.kwargs == {"overrides": {"head": "float32"}}
    assert made.inner == {"dtype": "float16", "rest": SimpleNamespace(dtype="float32")}


@pytest.mark.parametrize(
    ("options", "rounded"),
    [
        ({"quantization": "awq"}, ("awq weights", "vllm.quantization=awq")),
        ({"kv_cache_dtype": "fp8"}, ("fp8 KV cache", "vllm.kv_cache_dtype=fp8")),
        ({"kv_cache_dtype": "float16"}, ("float16 KV cache", "vllm.kv_cache_dtype=float16")),
        ({"kv_cache_dtype": "auto"}, ("", "")),
        ({"kv_cache_dtype": "bfloat16"}, ("", "")),
        ({"kv_cache_dtype": "float32"}, ("", "")),
        ({"kv_cache_dtype": None, "quantization": ""}, ("", "")),
    ],
)
def test_what_an_engine_keeps_in_fewer_bits(
    options: dict[str, Any], rounded: tuple[str, str]
) -> None:
    assert with_rounded(rollout("bf16"), options, "vllm").rounded == rounded


def test_fp8_weights_and_their_kv_cache_have_both_names() -> None:
    options = {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"}
    found = with_rounded(rollout("bf16"), options, "--sglang")
    assert (found.computes, found.because) == (FP8, "--sglang-quantization=fp8")
    assert found.rounded == ("fp8_e4m3 KV cache", "--sglang-kv-cache-dtype=fp8_e4m3")
