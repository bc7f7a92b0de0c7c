"""Rules that compare the weights that a trainer sent with its own, and the messages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precision_shim.auditing import sent_weights
from precision_shim.auditing.sent_weights import ADAPTERS, BASE, BIASES, Sent, Weights
from precision_shim.precision.agreement import ENGINE_NAMES

from ...processes.commands import command


def weights(dtype: str, exact: bool | None, **more: int) -> Weights:
    return Weights({dtype: 1_000_000, **more}, exact)


RIGHT = Sent(
    framework="verl",
    subject="actor",
    rank=0,
    asked="float16",
    key="rollout.dtype",
    sync=2,
    sent={BASE: weights("fp16", False)},
    own={BASE: weights("fp32", False)},
)


def codes(sent: Sent) -> list[str]:
    return [code for code, _ in sent.contradictions()]


def test_what_is_right_contradicts_nothing() -> None:
    assert codes(RIGHT) == []


# -- contradictions --------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["bfloat16", "auto", "float16", "fp8", ""])
@pytest.mark.parametrize("trainer", ["fp16", "bf16", ""])
def test_a_bf16_rollout_beside_an_fp16_trainer(trainer: str, asked: str) -> None:
    sent = replace(RIGHT, asked=asked, computes=trainer, sent={BASE: weights("bf16", True)})
    expected = trainer == "fp16" and asked == "bfloat16"
    assert ("rollout-dtype" in codes(sent)) is expected
    assert "rollout-dtype" not in codes(replace(sent, quantised=1))


def test_the_remedy_names_the_rollouts_key() -> None:
    sent = replace(RIGHT, asked="bfloat16", computes="fp16", sent={BASE: weights("bf16", True)})
    ((_, message),) = sent.contradictions()
    assert "Let the rollout compute in fp16 (rollout.dtype=float16)" in message
    ((_, message),) = replace(sent, key="").contradictions()
    assert "Let the rollout compute in fp16, or train in bf16." in message


@pytest.mark.parametrize("asked", ["float16", "float32"])
def test_weights_in_bf16(asked: str) -> None:
    assert codes(replace(RIGHT, asked=asked, sent={BASE: weights("bf16", True)})) == [
        "weights-dtype"
    ]
    then = replace(RIGHT, asked=asked, sent={BASE: weights("fp32", True)}, then="bf16")
    assert codes(then) == ["weights-dtype"]
    assert "fp32 (no more than bf16's bits), then rounded to bf16, of the trainer's fp32" in str(
        then
    )


@pytest.mark.parametrize("group", [BASE, ADAPTERS])
def test_a_bf16_wire(group: str) -> None:
    own = {BASE: weights("fp32", False), ADAPTERS: weights("fp32", False)}
    for dtype in ("fp16", "fp32"):
        assert codes(replace(RIGHT, own=own, sent={group: weights(dtype, 1.0)})) == ["bf16-wire"]


@pytest.mark.parametrize("asked", ["bfloat16", "float16", ""])
def test_a_routers_bias_that_is_rounded(asked: str) -> None:
    own = {**RIGHT.own, BIASES: weights("fp32", False)}
    sent = {BASE: weights("fp16", False), BIASES: weights("fp32", False)}
    right = replace(RIGHT, asked=asked, own=own, sent=sent)
    assert codes(right) == []
    assert codes(replace(right, then="fp16")) == ["weights-dtype"]
    rounded = replace(right, sent={**sent, BIASES: weights("bf16", True)})
    ((code, message),) = rounded.contradictions()
    assert (code, message.partition(":")[0]) == (
        "weights-dtype",
        "router biases go out in bf16, and the trainer keeps them in fp32",
    )
    in_bf16 = {**RIGHT.own, BIASES: weights("bf16", True)}
    assert codes(replace(rounded, own=in_bf16)) == []
    assert codes(replace(rounded, own=RIGHT.own)) == []  # the trainer's own is not known


# -- no finding if both dtypes are intended --------------------------------------------------------

NONE = {
    "a bf16 trainer beside an fp16 rollout": replace(
        RIGHT, sent={BASE: weights("bf16", True)}, own={BASE: weights("bf16", True)}
    ),
    "the same with routers and norms in fp32": replace(
        RIGHT,
        sent={BASE: weights("bf16", False, fp32=10_000)},
        own={BASE: weights("bf16", False, fp32=10_000)},
    ),
    "a bf16 wire into a bf16 rollout": replace(
        RIGHT, asked="bfloat16", sent={BASE: weights("bf16", True)}
    ),
    "the first sync of a bf16 checkpoint": replace(
        RIGHT, sent={BASE: weights("fp16", True)}, own={BASE: weights("fp32", True)}
    ),
    "an fp16 model whose compute dtype is not known beside a bf16 rollout": replace(
        RIGHT, asked="bfloat16", own={BASE: weights("fp16", False)}
    ),
    "adapters over a base that is frozen in bf16": replace(
        RIGHT,
        sent={BASE: weights("bf16", True), ADAPTERS: weights("fp32", False)},
        own={BASE: weights("bf16", True), ADAPTERS: weights("fp32", False)},
    ),
    "adapters alone": replace(
        RIGHT,
        sent={ADAPTERS: weights("fp32", False)},
        own={BASE: weights("fp32", True), ADAPTERS: weights("fp32", False)},
    ),
    "LoRA that was merged into a frozen base": replace(
        RIGHT, own={BASE: weights("fp32", True), ADAPTERS: weights("fp32", False)}
    ),
    "weights in 8 bits, and norms of 1 beside them": replace(
        RIGHT, quantised=1, sent={BASE: weights("fp16", True)}
    ),
    "an engine that quantises by itself": replace(
        RIGHT, asked="fp8", sent={BASE: weights("bf16", True)}
    ),
    "auto": replace(RIGHT, asked="auto"),
    "a dtype that is not known": replace(RIGHT, asked="", key=""),
    "weights that cannot be sampled": replace(RIGHT, sent={BASE: weights("fp16", None)}),
    "own weights that cannot be sampled": replace(
        RIGHT, sent={BASE: weights("fp16", True)}, own={BASE: weights("fp32", None)}
    ),
    "a trainer of which nothing is known": replace(
        RIGHT, sent={BASE: weights("bf16", True)}, own={}
    ),
}


@pytest.mark.parametrize("case", NONE)
def test_no_false_contradiction(case: str) -> None:
    assert codes(NONE[case]) == []


@given(
    own=st.booleans(),
    sent=st.booleans(),
    dtype=st.sampled_from(["fp16", "bf16", "fp32"]),
    computes=st.sampled_from(["fp16", "bf16", "fp32"]),
    before=st.sampled_from(["fp16", "bf16", "fp32"]),
)
def test_a_wire_is_found_by_dtype_or_values_and_never_beside_bf16(
    own: bool, sent: bool, dtype: str, computes: str, before: str
) -> None:
    one = replace(
        RIGHT,
        asked=ENGINE_NAMES[computes],
        sent={BASE: weights(dtype, sent)},
        own={BASE: weights(before, own)},
    )
    by_dtype = dtype == "bf16" and before != "bf16"
    by_value = sent and not own and not by_dtype
    expected = ["weights-dtype"] * by_dtype + ["bf16-wire"] * by_value
    assert codes(one) == (expected if computes != "bf16" else [])


# -- files and text --------------------------------------------------------------------------------


def test_files(tmp_path: Path) -> None:
    every = [RIGHT, replace(RIGHT, rank=1, quantised=1)]
    for one in every:
        sent_weights.write(str(tmp_path / "new"), one)
    (tmp_path / "new" / "other.rollout.json").write_text('{"framework": "verl"}', encoding="utf-8")
    found = dict(sent_weights.read(str(tmp_path / "new")))
    (broken,) = [one for one in found.values() if isinstance(one, str)]
    assert broken.startswith("KeyError")
    assert [one for one in found.values() if not isinstance(one, str)] == every
    assert {path.name for path in found} == {
        "verl.actor.sent.rank0.rollout.json",
        "verl.actor.sent.rank1.rollout.json",
        "other.rollout.json",
    }


def audit(folder: Path, *words: str) -> tuple[int, str]:
    return command("audit", folder, *words)[:2]


def test_the_command_on_a_contradiction(tmp_path: Path) -> None:
    wire = replace(RIGHT, sent={BASE: weights("fp16", True)}, head="fp32")
    for one in (wire, replace(wire, rank=1), replace(RIGHT, framework="skyrl")):
        sent_weights.write(str(tmp_path), one)
    (tmp_path / "x.rollout.json").write_text("{", encoding="utf-8")
    status, said = audit(tmp_path)
    assert status == 1
    lines = said.splitlines()
    (found,) = [one for one in lines if "contradiction" in one]
    assert found.startswith("  contradiction, ranks 0-1: bf16-wire: bf16 represents all weights")
    assert "x.rollout.json: JSONDecodeError" in said
    assert "; head computes in fp32" in said
    assert lines[-1] == "problems: see above"
    status, said = audit(tmp_path, "--json")
    assert status == 1
    skyrl, verl = json.loads(said)["rollouts"]
    assert skyrl["ok"]
    assert not verl["ok"]
    assert [one["code"] for one in verl["contradictions"]] == ["bf16-wire"]
    assert verl["contradictions"][0]["ranks"] == [0, 1]
