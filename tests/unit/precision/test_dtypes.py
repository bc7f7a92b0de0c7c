"""Dtype names: every spelling is accepted, and nothing but names."""

from __future__ import annotations

from types import MappingProxyType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from precision_shim.errors import DtypeError
from precision_shim.precision.dtypes import coerce_dtype, coerce_dtypes, name_of, parse_dtype

SPELLINGS = {
    torch.float32: ("fp32", "float32", "float", "32"),
    torch.bfloat16: ("bf16", "bfloat16"),
    torch.float16: ("fp16", "float16", "half", "16"),
    torch.uint8: ("fp8", "float8", "uint8"),
}
NAMES = [(name, dtype) for dtype, names in SPELLINGS.items() for name in names]

whitespace = st.text(" \t\r\n", max_size=3)


@st.composite
def spellings(draw):
    """Draw a name in any case, with or without prefix and whitespace, and its dtype."""
    name, dtype = draw(st.sampled_from(NAMES))
    name = draw(st.sampled_from(["", "torch."])) + name
    upper = draw(st.lists(st.booleans(), min_size=len(name), max_size=len(name)))
    name = "".join(c.upper() if up else c for c, up in zip(name, upper, strict=True))
    return draw(whitespace) + name + draw(whitespace), dtype


others = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8]),
    st.lists(st.text(), max_size=2),
    st.binary(max_size=3),
)


@given(spellings())
def test_every_spelling_means_its_dtype(spelling):
    text, dtype = spelling
    assert parse_dtype(text) is dtype
    assert coerce_dtype(text, key="exp_avg_dtype") is dtype


@given(others)
def test_what_is_no_string_passes_through(value):
    assert coerce_dtype(value, key="exp_avg_dtype") is value


@pytest.mark.parametrize(
    "name",
    [
        *("", " ", "fp", "bf 16", "fp64", "float64", "int8", "torch", "torch.", "None", "auto"),
        *("torch.torch.bf16", "bf16,", "fp32 fp32", "sentinel-override"),
    ],
)
def test_an_unknown_name_lists_every_legal_one(name):
    with pytest.raises(DtypeError) as caught:
        coerce_dtype(name, key="exp_avg_dtype", where="verl 0.7.1")
    message = str(caught.value)
    assert message.startswith("verl 0.7.1: exp_avg_dtype=")
    assert repr(name) in message
    listed = message.partition("allowed:")[2]
    for known, _ in NAMES:
        assert known in listed.replace(",", "/").replace(" ", "").split("/")


keys = st.sampled_from(["lr", "optimizer", "exp_avg", "dtype", "dtype_of", "fp16", "_dtypes", 3])


@given(
    st.dictionaries(st.sampled_from(["a_dtype", "exp_avg_dtype", "_dtype"]), spellings()),
    st.dictionaries(st.text(max_size=3).map("{}_dtype".format), others, max_size=2),
    st.dictionaries(keys, others | st.text(max_size=5), max_size=4),
)
def test_a_mapping_is_coerced_by_key_and_never_mutated(named, plain, rest):
    config = {**plain, **rest, **{key: text for key, (text, _) in named.items()}}
    before = dict(config)
    result = coerce_dtypes(MappingProxyType(config))
    assert config == before
    assert result is not config
    assert list(result) == list(config)
    for key, value in result.items():
        if key in named:
            assert value is named[key][1]
        else:
            assert value is config[key]


def test_the_key_of_a_bad_value_is_named():
    with pytest.raises(DtypeError, match="main_grads_dtype='bf17'"):
        coerce_dtypes({"exp_avg_dtype": "bf16", "main_grads_dtype": "bf17"})


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "fp32"),
        (torch.bfloat16, "bf16"),
        (torch.float16, "fp16"),
        (torch.uint8, "fp8"),
        (torch.float64, "float64"),
    ],
)
def test_names_for_messages(dtype, name):
    assert name_of(dtype) == name
