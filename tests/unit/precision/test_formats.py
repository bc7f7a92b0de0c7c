"""What quantized layers compute in, and whether two engines of a job agree in it."""

from __future__ import annotations

from typing import Any

import pytest

from precision_shim.precision.agreement import FP8, Engine, compare, judge_engines
from precision_shim.precision.formats import (
    BLOCKS,
    NVFP4,
    ROWS,
    TENSOR,
    UNKNOWN,
    Format,
    Quantized,
    forward_of,
    of_modelopt,
    of_section,
    parts_of,
)
from precision_shim_adapters.agreement.names import read_format as of_engine
from precision_shim_adapters.megatron.policy.formats import read_format

BLOCKWISE = Format(parts_of(Quantized("e4m3", BLOCKS), Quantized("e4m3", ROWS)), (), "mine")
PER_TENSOR = Format(parts_of(Quantized("e4m3", BLOCKS), Quantized("e4m3", TENSOR)), (), "its")
KNOWN = {forward_of(BLOCKWISE): ("rollout.quantization", "fp8")}


def side(subject: str, format: Format | None = None, computes: str = "bf16", **more: Any) -> Engine:
    return Engine(subject, computes, f"{subject}.dtype", format=format, **more)


def test_one_format_on_both_sides() -> None:
    for computes in ("bf16", FP8):
        found = compare(side("actor", BLOCKWISE), side("rollout", BLOCKWISE, computes))
        assert found.chosen == f"{BLOCKWISE}, as the actor"
        assert found.because.endswith("unasked, may still differ")
        assert (found.lost, found.apart) == (False, False)


def test_a_difference_is_named_by_its_part() -> None:
    found = compare(side("actor", BLOCKWISE), side("rollout", PER_TENSOR))
    assert found.apart
    assert "activations: actor fp8 e4m3 (blocks of 1x128), rollout fp8 e4m3 (per t" in found.because
    assert "weights: " not in found.because
    some = Format(BLOCKWISE.parts, ("lm_head",))
    told = compare(side("actor", BLOCKWISE), side("rollout", some))
    assert told.because.endswith("may differ: left out by the rollout alone: lm_head")
    assert (told.chosen, told.apart) == (
        "bf16 beside the actor's, quantized perhaps differently",
        False,
    )


def test_a_recipe_of_which_only_the_name_is_known() -> None:
    one, other = (Format({"layers": Quantized(name, "by ModelOpt")}) for name in ("a16", "a4"))
    found = compare(side("actor", one), side("rollout", one))
    assert (found.chosen, found.apart) == ("layers in a16 (by ModelOpt), as the actor", False)
    found = compare(side("actor", one), side("rollout", other))
    assert found.apart
    assert "layers: actor a16 (by ModelOpt), rollout a4 (by ModelOpt)" in found.because
    many = [Format(one.parts, tuple(f"layers.{n}" for n in (0, 1, 2, 3, last))) for last in (4, 5)]
    assert str(many[0]).endswith("; not in layers.0, layers.1, layers.2, 2 more")
    found = compare(side("actor", many[0]), side("rollout", many[1]))
    told = ("actor", "layers.4"), ("rollout", "layers.5")
    assert all(
        f"may differ: left out by the {who} alone: {it}" in found.because for who, it in told
    )


@pytest.mark.parametrize(
    ("theirs", "apart"),
    [
        (Quantized(UNKNOWN), False),
        (Quantized("e4m3"), False),
        (Quantized("int8"), True),  # whatever its scaling is
        (None, True),
    ],
)
def test_what_is_not_known_may_differ(theirs: Quantized | None, apart: bool) -> None:
    some = Format(parts_of(BLOCKWISE.parts["weights"], theirs), (), "its")
    found = compare(side("actor", BLOCKWISE), side("rollout", some))
    assert found.apart is apart
    assert ("may differ: activations: actor " in found.because) is not apart


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("trainer", [None, BLOCKWISE])
def test_one_side_only_is_a_problem_where_the_user_asked_to_follow(
    trainer: Format | None, follow: bool
) -> None:
    sides = side("actor", trainer), [side("rollout", None if trainer else BLOCKWISE)]
    found, _ = judge_engines("verl", "verl 1", *sides, follow=follow, may_write=True)
    (made,) = found.decisions
    assert made.chosen != "bf16, as the actor"
    assert "quantized layers: the actor has " in made.because
    assert len(found.problems) == follow


def test_follow_writes_the_format_for_which_the_engine_has_a_key() -> None:
    rollout = side("rollout", quantizes=KNOWN)
    both = side("actor", BLOCKWISE), [rollout]
    found, writes = judge_engines("verl", "verl 1", *both, follow=True, may_write=True)
    assert writes == {"rollout.quantization": "fp8"}
    assert (found.problems, found.decisions[1].chosen) == ((), f"{BLOCKWISE}, as the actor")
    other = side("actor", PER_TENSOR), [rollout]
    found, writes = judge_engines("verl", "verl 1", *other, follow=True, may_write=True)
    assert (writes, len(found.problems)) == ({}, 1)


def test_megatrons_fields() -> None:
    assert read_format({"fp8": None, "fp8_recipe": "delayed"}) is None
    found = read_format({"fp8": "hybrid", "first_last_layers_bf16": True}, "layers.{}")
    assert found is not None
    assert str(found) == (
        "weights and activations in fp8 e4m3 (delayed per tensor), gradients in fp8 e5m2 "
        "(delayed per tensor); not in the first 1 layers, the last 1 layers"
    )
    assert found.key == "layers.fp8=hybrid"
    texts = {
        "mxfp8": "weights and activations and gradients in fp8 e4m3 (mx, 1x32)",
        "tensorwise": "weights and activations and gradients in fp8 e4m3 (per tensor)",
        "auto": "weights and activations and gradients in fp8 e4m3 (not known here)",
    }
    for recipe, text in texts.items():
        assert str(read_format({"fp8": "e4m3", "fp8_recipe": recipe})) == text
    low = read_format({"fp4": "e2m1"})
    assert low is not None
    assert low.parts["activations"] == Quantized("e2m1", NVFP4)
    custom = read_format({"quant_recipe": "mine.yaml"}, "layers.{}")
    assert custom is not None
    assert custom.key == "layers.quant_recipe: what it changes is not known here"


FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
OF_CHECKPOINTS = {
    "weights in fp8 e4m3 (blocks of 128x128), activations in fp8 e4m3 (blocks of 1x128)": {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "weights and activations in fp8 e4m3 (per tensor)": {
        "quant_method": "fp8",
        "activation_scheme": "static",
    },
    "weights in int4 (groups of 128)": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "weights and activations in fp4 e2m1 (nvfp4, 1x16); not in lm_head": {
        "quant_method": "compressed-tensors",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"weights": FP4, "input_activations": FP4}},
    },
    "weights in fp8 e4m3 (per channel), activations in fp8 e4m3 (per token)": {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                "input_activations": {"num_bits": 8, "type": "float", "strategy": "token"},
            }
        },
    },
    "weights and activations in fp8 e4m3 (mx, 1x32)": {"quant_method": "mxfp8"},
    "weights and activations in not known here (not known here)": {"quant_method": "modelopt"},
}


@pytest.mark.parametrize(("text", "section"), OF_CHECKPOINTS.items(), ids=lambda one: str(one)[:40])
def test_a_checkpoints_quantization(text: str, section: dict[str, Any]) -> None:
    found = of_section(section, "config.json")
    assert str(found) == text
    assert found.key == f"config.json: {section['quant_method']}"


def test_an_engines_options() -> None:
    assert of_engine({"dtype": "bfloat16", "quantization": None}, "vllm") is None
    linear = of_engine({"quantization_config": {"linear": "fp8", "ignore": ["gate"]}}, "vllm")
    assert linear is not None
    assert linear.parts["weights"] == Quantized("e4m3", TENSOR)
    assert (linear.left_out, linear.key) == (("gate",), "vllm.quantization_config.linear=fp8")
    section = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    blocks = of_engine(
        {"quantization": "fp8", "hf_overrides": {"quantization_config": section}}, "v"
    )
    assert blocks is not None
    assert blocks.parts == BLOCKWISE.parts
    flag = of_engine({"quantization": "fp8_per_block"}, "--sglang")
    assert flag is not None
    assert (flag.parts, flag.key) == (BLOCKWISE.parts, "--sglang-quantization=fp8_per_block")
    plain = [of_engine({"quantization": "fp8"}, one, one) for one in ("vllm", "sglang")]
    weights = [one.parts["weights"].scaling for one in plain if one is not None]
    assert weights == [TENSOR, UNKNOWN]


OFF = {"quantizer_name": "*", "enable": False}
NVFP4_CFG = {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}}
WEIGHTS, INPUTS = "*weight_quantizer", "*input_quantizer"


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        (
            {WEIGHTS: NVFP4_CFG, INPUTS: NVFP4_CFG, "*lm_head*": None},
            "weights and activations in fp4 e2m1 (nvfp4, 1x16); not in lm_head",
        ),
        (
            {"*mlp*weight_quantizer": {"num_bits": 4, "block_sizes": {-1: 128}}},
            "weights in int4 (groups of 128); not in all but mlp",
        ),
        (
            {
                WEIGHTS: {"num_bits": "e4m3", "block_sizes": {-1: 128, -2: 128}},
                INPUTS: {"num_bits": [4, 3], "block_sizes": {-1: None, "type": "dynamic"}},
            },
            "weights in fp8 e4m3 (blocks of 128x128), activations in fp8 e4m3 (per token)",
        ),
        (
            {WEIGHTS: {"num_bits": (4, 3), "axis": 0}, "*[kv]_bmm_quantizer": {"num_bits": (4, 3)}},
            "weights in fp8 e4m3 (per channel), KV cache in fp8 e4m3 (per tensor)",
        ),
        (
            {
                WEIGHTS: {"num_bits": "e4m3", "block_sizes": {-1: 32, "scale_bits": "e8m0"}},
                INPUTS: [NVFP4_CFG, {"num_bits": (4, 3)}],
            },
            f"weights in fp8 e4m3 (mx, 1x32), activations in {UNKNOWN} ({UNKNOWN})",
        ),
        # Two formats for the same part of different modules.
        (
            {"*mlp*weight_quantizer": NVFP4_CFG, "*attn*weight_quantizer": {"num_bits": (4, 3)}},
            f"weights in {UNKNOWN} ({UNKNOWN}); not in all but mlp and attn",
        ),
    ],
)
def test_modelopts_list_of_quantizers(entries: dict[str, Any], text: str) -> None:
    made: list[dict[str, Any]] = [OFF]
    for name, cfg in entries.items():
        more = {"enable": False} if cfg is None else {"cfg": cfg}
        made.append({"quantizer_name": name, **more})
    made.append({"parent_class": "nn.LeakyReLU", **OFF})
    assert str(of_modelopt(made, "key")) == text
    off = {"quantizer_name": WEIGHTS, "enable": False}
    assert "weights" not in of_modelopt([*made, off], "key").parts
    assert of_modelopt([*made, OFF], "key").parts == {}
