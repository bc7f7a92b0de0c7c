"""Rules that compare the weights that a trainer sent with those of an engine, and the messages."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precision_shim.auditing import halves
from precision_shim.auditing.contradictions import LEAST_SAMPLE, contradictions
from precision_shim.auditing.halves import ADAPTERS, BASE, Held, Sent, Weights
from precision_shim.auditing.layers import is_named, joined, kind_of
from precision_shim.auditing.pairing import pair
from precision_shim.cli import main
from precision_shim.precision.agreement import ENGINE_NAMES

MANY = 10_000


def weights(dtype: str, exact: float | None, **more: int) -> Weights:
    return Weights({dtype: 1_000_000, **more}, exact, MANY)


RIGHT = Sent(
    framework="verl",
    subject="actor",
    rank=0,
    world_size=2,
    job="1",
    asked="float16",
    key="rollout.dtype",
    sync=2,
    sent={BASE: weights("fp16", 0.125)},
    own={BASE: weights("fp32", 0.001)},
)
ENGINE = Held(
    framework="verl",
    subject="rollout",
    name="vllm_server_0_0",
    job="1",
    engine="vllm 0.30.0",
    model="/model",
    computes="fp16",
    kv_cache="auto",
    kv_held=("fp16",),
    head="fp16",
    sync=2,
    kinds={"attention": {"fp16": 10}, "mlp": {"fp16": 20}, "norm": {"fp16": 1}},
    plain=tuple(
        f"model.layers.{n}.mlp.{one}" for n in range(3) for one in ("gate_up_proj", "gate")
    ),
    weights=weights("fp16", 0.125),
)
FP8 = replace(
    ENGINE,
    quantization="fp8",
    ignored=("lm_head",),
    quantised=tuple(f"model.layers.{n}.self_attn.qkv_proj" for n in range(3)),
    plain=(),
)


def codes(sent: Any, held: Any = ()) -> list[str]:
    several = sent if isinstance(sent, list) else [sent]
    engines = held if isinstance(held, (list, tuple)) else [held]
    return [one.code for one in contradictions(several, engines)]


def test_what_is_right_contradicts_nothing() -> None:
    assert codes(RIGHT, ENGINE) == []
    assert codes(RIGHT) == codes([], ENGINE) == codes([], FP8) == codes(RIGHT, FP8) == []


# -- contradictions --------------------------------------------------------------------------------


def test_a_dtype_that_goes_over_the_key() -> None:
    (found,) = contradictions([RIGHT, replace(RIGHT, rank=1)], [replace(ENGINE, computes="fp32")])
    assert found.code == "engine-dtype"
    assert found.who == "vllm_server_0_0"
    assert found.message.startswith("rollout.dtype=float16, but the engine computes in fp32")


@pytest.mark.parametrize("asked", ["bfloat16", "auto", "float16", "fp8", ""])
@pytest.mark.parametrize("trainer", ["fp16", "bf16", ""])
def test_a_bf16_rollout_beside_an_fp16_trainer(trainer: str, asked: str) -> None:
    sent = replace(RIGHT, asked=asked, computes=trainer, sent={BASE: weights("bf16", 1.0)})
    engine = replace(ENGINE, computes="bf16", kinds={}, weights=None)
    expected = ["rollout-dtype"] * (trainer == "fp16")
    # Another dtype than the key's is a contradiction of its own.
    assert codes(sent, engine) == (["engine-dtype"] if asked == "float16" else expected)
    assert "rollout-dtype" not in codes(sent, replace(engine, quantization="fp8"))
    assert "rollout-dtype" not in codes(sent, replace(engine, computes="fp32"))
    # Without an engine's answer, only its key tells in which dtype it computes.
    alone = contradictions([sent, replace(sent, rank=1)], [])
    named = [one.who for one in alone if one.code == "rollout-dtype"]
    assert named == [0, 1] * (trainer == "fp16" and asked == "bfloat16")
    in_8_bits = replace(sent, quantised=("model.layers.0.mlp.up_proj",))
    assert "rollout-dtype" not in codes(in_8_bits)


def test_the_remedy_names_the_rollouts_key() -> None:
    sent = replace(RIGHT, asked="bfloat16", computes="fp16", sent={BASE: weights("bf16", 1.0)})
    (found,) = contradictions([sent], [])
    assert "Let the rollout compute in fp16 (rollout.dtype=float16)" in found.message
    (found,) = contradictions([replace(sent, key="")], [])
    assert "Let the rollout compute in fp16, or train in bf16." in found.message


@pytest.mark.parametrize("held", [(), ENGINE])
@pytest.mark.parametrize("asked", ["float16", "float32"])
def test_weights_in_bf16(held: Any, asked: str) -> None:
    sent = replace(RIGHT, asked=asked, sent={BASE: weights("bf16", 1.0)})
    engine = held and replace(held, computes={"float16": "fp16", "float32": "fp32"}[asked])
    assert codes(sent, engine) == ["weights-dtype"]
    then = replace(RIGHT, asked=asked, sent={BASE: weights("fp32", 1.0)}, then="bf16")
    assert codes(then, engine) == ["weights-dtype"]


@pytest.mark.parametrize("group", [BASE, ADAPTERS])
def test_a_bf16_wire(group: str) -> None:
    own = {BASE: weights("fp32", 0.001), ADAPTERS: weights("fp32", 0.002)}
    for dtype in ("fp16", "fp32"):
        sent = replace(RIGHT, own=own, sent={group: weights(dtype, 1.0)})
        assert codes(sent) == ["bf16-wire"]
        assert codes(sent, ENGINE if group == ADAPTERS else ()) == ["bf16-wire"]


def test_a_bf16_wire_behind_the_sender() -> None:
    engine = replace(ENGINE, weights=weights("fp16", 1.0))
    assert codes(RIGHT, engine) == ["bf16-wire"]
    # Before the first sync the engine has the checkpoint's weights.
    assert codes(RIGHT, replace(engine, sync=0)) == []
    assert codes(RIGHT, replace(engine, sync=8)) == []


@pytest.mark.parametrize("sender", ["fp32", ""])
@pytest.mark.parametrize("engine", ["fp32", "fp16", ""])
def test_a_head_in_fp32_on_one_side_alone(sender: str, engine: str) -> None:
    several = [replace(RIGHT, head=sender), replace(RIGHT, head=sender, rank=1)]
    expected = ["head-dtype"] * ((sender, engine) == ("fp32", "fp16"))
    assert codes(several, replace(ENGINE, head=engine)) == expected
    # The trainer may compute in fp32 as a whole, unless the record says otherwise.
    several = [replace(one, computes="fp16") for one in several]
    expected += ["head-dtype"] * ((sender, engine) == ("", "fp32"))
    assert codes(several, replace(ENGINE, head=engine)) == expected
    assert codes(several, replace(ENGINE, head="fp32", computes="fp32")) == ["engine-dtype"]


def test_layers_in_another_dtype_than_the_engine_computes_in() -> None:
    kinds = {"attention": {"fp16": 10, "bf16": 2}, "mlp": {"bf16": 20}, "norm": {"bf16": 1}}
    (found,) = contradictions([], [replace(ENGINE, kinds=kinds)])
    assert found.code == "held-dtype"
    assert "attention, mlp" in found.message
    assert "norm" not in found.message


def test_fifty_six_layers_left_out_by_a_piece_of_their_names() -> None:
    """The routers' name "mlp.gate" is a part of "mlp.gate_up_proj", so 56 layers are left out."""
    layers = range(56)
    engine = replace(
        FP8,
        ignored=("mlp.gate", "lm_head"),
        quantised=tuple(f"model.layers.{n}.mlp.down_proj" for n in layers),
        plain=tuple(
            f"model.layers.{n}.mlp.{one}" for n in layers for one in ("gate", "gate_up_proj")
        ),
    )
    (found,) = contradictions([], [engine])
    assert found.code == "layers-quantised"
    assert "holds 56 layers in 16 bits that fp8 was meant for" in found.message
    assert "'mlp.gate', which is only a piece of their names" in found.message
    assert "model.layers.0.mlp.gate_up_proj" in found.message
    assert codes([], replace(engine, ignored=("mlp.gate", "mlp.gate_up_proj"))) == []
    assert codes([], replace(engine, ignored=("mlp.gate", "gate_proj", "up_proj"))) == []
    assert codes([], replace(engine, ignored=None)) == []


def test_some_layers_of_a_kind_that_no_list_names() -> None:
    engine = replace(FP8, plain=("model.layers.7.self_attn.qkv_proj",))
    assert codes([], engine) == ["layers-quantised"]
    for named in (
        "model.layers.7.self_attn.q_proj",
        "model.layers.7",
        "re:.*layers\\.7\\..*",
        "*layers.7*",
        "language_model.layers.7.self_attn.qkv_proj",
    ):
        assert codes([], replace(engine, ignored=(named,))) == []


def test_layers_sent_in_8_bits_and_held_as_they_are() -> None:
    sent = replace(
        RIGHT,
        asked="fp8",
        quantised=tuple(
            f"model.layers.{n}.mlp.{one}_proj" for n in range(2) for one in ("gate", "up")
        ),
    )
    engine = replace(FP8, plain=("model.layers.1.mlp.gate_up_proj",), ignored=None)
    (found,) = contradictions([sent], [engine])
    assert found.code == "layers-quantised"
    assert "holds 1 layer without quantisation" in found.message
    assert codes(sent, replace(engine, quantised=engine.plain, plain=())) == []


# -- no finding if both dtypes are intended --------------------------------------------------------

NONE = {
    "a bf16 trainer beside an fp16 rollout": (
        replace(RIGHT, sent={BASE: weights("bf16", 1.0)}, own={BASE: weights("bf16", 1.0)}),
        ENGINE,
    ),
    "the same with routers and norms in fp32": (
        replace(
            RIGHT,
            sent={BASE: weights("bf16", 0.99, fp32=10_000)},
            own={BASE: weights("bf16", 0.97, fp32=10_000)},
        ),
        ENGINE,
    ),
    "a bf16 wire into a bf16 rollout": (
        replace(RIGHT, asked="bfloat16", sent={BASE: weights("bf16", 1.0)}),
        replace(ENGINE, computes="bf16", kinds={"mlp": {"bf16": 1}}),
    ),
    "the first sync of a bf16 checkpoint": (
        replace(RIGHT, sent={BASE: weights("fp16", 1.0)}, own={BASE: weights("fp32", 1.0)}),
        ENGINE,
    ),
    "an fp16 trainer beside a bf16 rollout, asked for so": (
        replace(RIGHT, asked="bfloat16", own={BASE: weights("fp16", 0.125)}),
        replace(ENGINE, computes="bf16", kinds={"mlp": {"bf16": 1}}, weights=weights("bf16", 1.0)),
    ),
    "norms and routers that the engine keeps in fp32": (
        RIGHT,
        replace(
            ENGINE,
            kinds={
                "attention": {"fp16": 9},
                "router": {"fp32": 3, "bf16": 1},
                "norm": {"fp32": 3},
                "other": {"bf16": 1, "fp32": 1},
            },
        ),
    ),
    "a tied head": (RIGHT, replace(ENGINE, kinds={"embedding": {"fp16": 9}})),
    "a head in fp32": (RIGHT, replace(ENGINE, head="fp32", kinds={"head": {"fp32": 9}})),
    "adapters over a base that is frozen in bf16": (
        replace(
            RIGHT,
            sent={BASE: weights("bf16", 1.0), ADAPTERS: weights("fp32", 0.1)},
            own={BASE: weights("bf16", 1.0), ADAPTERS: weights("fp32", 0.1)},
        ),
        replace(ENGINE, weights=weights("fp16", 1.0)),
    ),
    "adapters alone": (
        replace(
            RIGHT,
            sent={ADAPTERS: weights("fp32", 0.1)},
            own={BASE: weights("fp32", 1.0), ADAPTERS: weights("fp32", 0.1)},
        ),
        replace(ENGINE, weights=weights("fp16", 1.0)),
    ),
    "LoRA that was merged into a frozen base": (
        replace(RIGHT, own={BASE: weights("fp32", 1.0), ADAPTERS: weights("fp32", 0.1)}),
        ENGINE,
    ),
    "weights in 8 bits, and norms of 1 beside them": (
        replace(
            RIGHT,
            asked="fp8",
            quantised=("model.layers.0.self_attn.qkv_proj",),
            sent={BASE: weights("fp16", 1.0)},
        ),
        FP8,
    ),
    "an engine that quantises by itself": (
        replace(RIGHT, asked="fp8", sent={BASE: weights("bf16", 1.0)}),
        replace(FP8, computes="bf16", weights=weights("bf16", 1.0)),
    ),
    "a teacher of the same model in bf16": (
        RIGHT,
        [ENGINE, replace(ENGINE, subject="teacher", computes="bf16", kinds={"mlp": {"bf16": 1}})],
    ),
    "another model's reward server in fp8": (RIGHT, [ENGINE, replace(FP8, subject="reward model")]),
    "auto": (replace(RIGHT, asked="auto"), replace(ENGINE, computes="fp32")),
    "a dtype that is not known": (replace(RIGHT, asked="", key=""), ENGINE),
    "an engine that does not answer": (
        RIGHT,
        replace(ENGINE, kinds={}, plain=(), weights=None, not_answered="it may not"),
    ),
    "too few numbers": (
        replace(RIGHT, sent={BASE: Weights({"fp16": 9}, 1.0, LEAST_SAMPLE - 1)}),
        ENGINE,
    ),
    "a trainer of which nothing is known": (
        replace(RIGHT, sent={BASE: weights("bf16", 1.0)}, own={}),
        ENGINE,
    ),
    "a vision tower that its model does not quantise": (
        replace(RIGHT, asked="fp8"),
        replace(FP8, plain=("visual.blocks.0.attn.qkv", "visual.blocks.0.mlp.up_proj")),
    ),
}


@pytest.mark.parametrize("case", NONE)
def test_no_false_contradiction(case: str) -> None:
    assert codes(*NONE[case]) == []


def test_another_jobs_files_are_another_pair() -> None:
    """A job with another rollout has used the directory before."""
    before = replace(
        ENGINE, name="vllm_server_3_0", job="0", computes="bf16", kinds={"mlp": {"bf16": 1}}
    )
    old, new = pair([RIGHT, ENGINE, before])
    assert (old.job, new.job) == ("0", "1")
    assert old.ok
    assert new.ok
    assert "  sent: not known: no process of the trainer told it" in old.lines()


@given(
    own=st.floats(0, 1),
    sent=st.floats(0, 1),
    dtype=st.sampled_from(["fp16", "bf16", "fp32"]),
    computes=st.sampled_from(["fp16", "bf16", "fp32"]),
    before=st.sampled_from(["fp16", "bf16", "fp32"]),
)
def test_a_wire_is_found_by_dtype_or_share_and_never_beside_bf16(
    own: float, sent: float, dtype: str, computes: str, before: str
) -> None:
    one = replace(
        RIGHT,
        asked=ENGINE_NAMES[computes],
        sent={BASE: weights(dtype, sent)},
        own={BASE: weights(before, own)},
    )
    by_dtype = dtype == "bf16" and before != "bf16"
    by_share = own < 0.98 and sent > 0.999 and not by_dtype
    expected = ["weights-dtype"] * by_dtype + ["bf16-wire"] * by_share
    assert codes(one) == (expected if computes != "bf16" else [])


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("embedding.word_embeddings.weight", "embedding"),
        ("model.layers.0.self_attn.qkv_proj.weight", "attention"),
        ("decoder.layers.0.self_attention.linear_qkv.weight", "attention"),
        ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", "norm"),
        ("model.layers.0.self_attn.q_norm.weight", "norm"),
        ("model.layers.0.mlp.gate_up_proj.weight", "mlp"),
        ("model.layers.0.mlp.gate_proj.weight", "mlp"),
        ("model.layers.0.mlp.gate.weight", "router"),
        ("model.layers.0.mlp.gate.e_score_correction_bias", "router"),
        ("decoder.layers.0.mlp.router.weight", "router"),
        ("model.layers.0.mlp.experts.w13_weight", "experts"),
        ("lm_head.weight", "head"),
        ("output_layer.weight", "head"),
        ("score.weight", "head"),
        ("base_model.model.layers.0.self_attn.q_proj.lora_A.default.weight", "adapters"),
        ("model.layers.0.mixer.A_log", "other"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_joined_names() -> None:
    for name in ("q_proj", "k_proj", "v_proj", "qkv_proj"):
        assert joined(f"model.language_model.layers.3.self_attn.{name}") == (
            "layers.3.self_attn.qkv_proj"
        )
    assert joined("model.layers.3.mlp.experts.17.down_proj") == joined("layers.3.mlp.experts")
    assert joined("lm_head") == "lm_head"


@given(
    layer=st.lists(
        st.sampled_from(["model", "layers", "0", "10", "mlp", "gate", "gate_up"]), min_size=1
    ),
    data=st.data(),
)
def test_any_run_of_whole_words_names_a_layer(layer: list[str], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(layer) - 1))
    last = data.draw(st.integers(first + 1, len(layer)))
    assert is_named(".".join(layer), [".".join(layer[first:last])])
    assert not is_named(".".join(layer), ["mlp.gat"])


# -- files and text --------------------------------------------------------------------------------


def test_files(tmp_path: Path) -> None:
    every = [RIGHT, replace(RIGHT, rank=1, quantised=("a",)), ENGINE, FP8]
    for one in every:
        halves.write(str(tmp_path / "new"), one)
    (tmp_path / "new" / "other.rollout.json").write_text('{"half": "sent"}', encoding="utf-8")
    found = dict(halves.read(str(tmp_path / "new")))
    (broken,) = [one for one in found.values() if isinstance(one, str)]
    assert broken.startswith("KeyError")
    assert [one for one in found.values() if one in every] == [*every[:2], FP8]
    assert {path.name for path in found} == {
        "verl.actor.sent.rank0.rollout.json",
        "verl.actor.sent.rank1.rollout.json",
        "verl.rollout.held.vllm_server_0_0.rollout.json",
        "other.rollout.json",
    }


def audit(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(folder), *words])
    return int(ended.value.code or 0), capsys.readouterr().out


def test_the_command_on_what_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for one in (RIGHT, replace(RIGHT, rank=1), ENGINE):
        halves.write(str(tmp_path), one)
    status, said = audit(tmp_path, capsys)
    assert status == 0
    assert said.splitlines() == [
        "verl, trainer and rollout, job 1",
        "  sent, ranks 0-1: actor, sync 2; float16 asked (rollout.dtype); weights in fp16, exact "
        "in bf16: 12 %, of the trainer's own 0 %",
        "  held, vllm_server_0_0: rollout, vllm 0.30.0; computes in fp16; attention/mlp/norm in "
        "fp16; KV cache fp16 (auto); head computes in fp16; sync 2: exact in bf16: 12 %",
        "",
        "no problems",
    ]


def test_the_command_on_a_contradiction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wire = replace(RIGHT, sent={BASE: weights("fp16", 1.0)})
    for one in (
        wire,
        replace(wire, rank=1),
        replace(RIGHT, framework="skyrl", not_asked="it is so"),
    ):
        halves.write(str(tmp_path), one)
    status, said = audit(tmp_path, capsys)
    assert status == 1
    lines = said.splitlines()
    assert "  held: not known: it is so" in lines
    assert "  held: not known: no engine told it" in lines
    (found,) = [one for one in lines if "contradiction" in one]
    assert found.startswith("  contradiction, ranks 0-1: bf16-wire: bf16 represents all weights")
    assert lines[-1] == "problems: see above"
    status, said = audit(tmp_path, capsys, "--json")
    assert status == 1
    skyrl, verl = json.loads(said)["rollouts"]
    assert skyrl["ok"]
    assert not verl["ok"]
    assert [one["code"] for one in verl["contradictions"]] == ["bf16-wire"]
    assert verl["contradictions"][0]["who"] == [0, 1]


def test_the_command_on_an_engine_that_may_not_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    halves.write(str(tmp_path), replace(ENGINE, weights=None, not_answered="no functions"))
    status, said = audit(tmp_path, capsys)
    assert status == 0
    assert "computes in fp16; KV cache ? (auto); weights not known: no functions" in said
    (tmp_path / "x.rollout.json").write_text("{", encoding="utf-8")
    status, said = audit(tmp_path, capsys)
    assert status == 1
    assert "x.rollout.json: JSONDecodeError" in said


@pytest.mark.parametrize("share", ["NaN", "Infinity", "-0.5", "1.5", "1e999"])
@pytest.mark.parametrize("one", [RIGHT, ENGINE], ids=lambda one: type(one).__name__)
def test_a_share_that_is_none_is_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], one: halves.Half, share: str
) -> None:
    halves.write(str(tmp_path), one)
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text().replace('"exact": 0.125', f'"exact": {share}'))
    status, said = audit(tmp_path, capsys)
    assert status == 1
    assert f"{path.name}: ValueError: exact is {float(share)}, expected a share" in said


def test_a_sample_of_some_weights_is_shown_and_judges_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wire = replace(ENGINE, kinds={}, kv_held=(), weights=Weights({}, 1.0, 1024))
    assert codes(RIGHT, wire) == ["bf16-wire"]
    some = replace(wire, sample="k_proj of the first layer")
    assert codes(RIGHT, some) == []
    for one in (RIGHT, some):
        halves.write(str(tmp_path), one)
    status, said = audit(tmp_path, capsys)
    assert status == 0
    assert "sync 2: exact in bf16: 100 % of k_proj of the first layer" in said


def test_a_record_without_a_field_that_came_later_is_read() -> None:
    values = asdict(ENGINE)
    del values["sample"]
    assert Held.of(values) == ENGINE


def test_to_dict_round_trips() -> None:
    for one in (RIGHT, ENGINE, FP8):
        assert type(one).of(json.loads(json.dumps(asdict(one)))) == one
