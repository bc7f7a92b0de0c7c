"""What is legal depends on the installed TransformerEngine; without one, on the newest table."""

from __future__ import annotations

import pytest
import torch

from precision_shim.errors import DtypeError
from precision_shim_adapters.megatron.policy.legality import (
    FusedAdamSupport,
    check_dtypes,
    legal_dtypes,
    release,
)

FP32, BF16, FP16, FP8 = torch.float32, torch.bfloat16, torch.float16, torch.uint8
NAMES = {FP32: "fp32", BF16: "bf16", FP16: "fp16", FP8: "fp8", torch.float64: "float64"}
OLD, NEW = {FP32, FP16, FP8}, {FP32, BF16, FP16, FP8}

# The dtypes that FusedAdam's constructor accepts in each release, and Megatron's own choices.
MOMENTS = {
    **dict.fromkeys(("1.13", "2.1", "2.2.1"), OLD),
    **dict.fromkeys(("2.3", "2.11", "2.14", "2.19", "2.20.2", None), NEW),
}
OTHERS = {
    "main_params_dtype": {FP32, FP16},
    "main_grads_dtype": {FP32, BF16},
    "params_dtype": {FP32, BF16, FP16},
}


def support(version):
    if version is None:
        return FusedAdamSupport()
    return FusedAdamSupport(release(version), True, "")


CASES = [
    (version, field, dtype, dtype in legal)
    for version, moments in MOMENTS.items()
    for field, legal in {"exp_avg_dtype": moments, "exp_avg_sq_dtype": moments, **OTHERS}.items()
    for dtype in NAMES
]


@pytest.mark.parametrize(("version", "field", "dtype", "legal"), CASES)
def test_each_field_takes_what_its_transformer_engine_takes(version, field, dtype, legal):
    config = {"lr": 1e-4, field: dtype}
    if legal:
        check_dtypes(config, support(version))
        assert dtype in legal_dtypes(field, support(version))
        return
    with pytest.raises(DtypeError) as caught:
        check_dtypes(config, support(version), where="verl 0.7.1")
    message = str(caught.value)
    assert message.startswith(f"verl 0.7.1: {field}={NAMES[dtype]!r}")
    assert (f"TransformerEngine {version}" if version else "no TransformerEngine") in message
    allowed = message.partition("allowed: ")[2].partition(".")[0].split(", ")
    assert {NAMES[one] for one in legal_dtypes(field, support(version))} == set(allowed)


@pytest.mark.parametrize("version", ["1.13", "2.2.1"])
def test_bf16_moments_say_which_release_takes_them(version):
    with pytest.raises(DtypeError, match=r"2\.3 or newer"):
        check_dtypes({"exp_avg_dtype": BF16}, support(version))


@pytest.mark.parametrize("version", [*MOMENTS, "9.0"])
def test_bf16_master_weights_are_never_legal(version):
    with pytest.raises(DtypeError, match="no bf16 master weights"):
        check_dtypes({"main_params_dtype": BF16}, support(version))


@pytest.mark.parametrize("version", MOMENTS)
def test_what_has_no_rule_passes(version):
    config = {"other_dtype": BF16, "exp_avg": BF16, "exp_avg_dtype": None, "main_params_dtype": "x"}
    check_dtypes(config, support(version))
    assert legal_dtypes("other_dtype", support(version)) is None


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("2.11.0", (2, 11, 0)),
        ("2.11.0.dev0+cu13", (2, 11, 0)),
        ("2.3+abc", (2, 3)),
        ("2.3rc1", (2, 3)),
        ("10", (10,)),
        ("", ()),
        ("stand-in", ()),
    ],
)
def test_release_numbers(text, numbers):
    assert release(text) == numbers


@pytest.mark.parametrize(("version", "legal"), [("2.2.1", False), ("2.3", True), ("2.3.0", True)])
def test_versions_compare_as_numbers(version, legal):
    assert support(version).bf16_moments is legal
    # Without TransformerEngine bf16 moments are legal in a config, but nothing can run them.
    assert not FusedAdamSupport().bf16_moments
