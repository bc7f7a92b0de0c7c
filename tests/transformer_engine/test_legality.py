"""Our rules and our stand-in, compared with the constructor of the real FusedAdam.

These tests need TransformerEngine (``tox run -e te``). FusedAdam's constructor checks dtypes
without a GPU. Only a counter that the constructor allocates on the GPU must be put on the CPU.
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch

from precision_shim_adapters.megatron.policy.legality import FusedAdamSupport, legal_dtypes, release
from precision_shim_tools.testing.fused_adam import fused_adam_for
from precision_shim_tools.testing.megatron_cpu import cuda_means_cpu
from precision_shim_tools.testing.transformer_engine import real_transformer_engine

REAL = real_transformer_engine()
pytestmark = pytest.mark.skipif(REAL is None, reason="needs TransformerEngine")

DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.float64,
    torch.int16,
    torch.int8,
    torch.float8_e4m3fn,
)
FIELDS = {
    "main_params_dtype": "master_weight_dtype",
    "exp_avg_dtype": "exp_avg_dtype",
    "exp_avg_sq_dtype": "exp_avg_sq_dtype",
}


def refusal(adam: Any, **options: Any) -> str:
    """The constructor's error for these options, or an empty string."""
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    try:
        with cuda_means_cpu():
            adam([parameter], lr=1e-3, master_weights=True, **options)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("field", FIELDS)
def test_rule_is_the_constructors(field: str, dtype: torch.dtype) -> None:
    assert REAL is not None
    version, adam = REAL
    legal = legal_dtypes(field, FusedAdamSupport(release(version), True, ""))
    assert legal is not None
    assert (dtype in legal) == (not refusal(adam, **{FIELDS[field]: dtype}))


def test_the_rules_reach_the_installed_release() -> None:
    from precision_shim_adapters.megatron.policy.legality import NEWEST

    assert REAL is not None
    assert NEWEST.version is not None
    assert release(REAL[0])[:2] <= NEWEST.version


def test_stand_in_has_the_signature() -> None:
    assert REAL is not None
    version, adam = REAL
    real = inspect.signature(adam.__init__).parameters
    ours = inspect.signature(fused_adam_for(version).__init__).parameters
    assert {name: p.kind for name, p in ours.items()} == {n: p.kind for n, p in real.items()}
    assert {n: p.default for n, p in ours.items()} == {n: p.default for n, p in real.items()}


def test_stand_in_refuses_the_same() -> None:
    assert REAL is not None
    version, adam = REAL
    ours = fused_adam_for(version)
    differing = []
    for master, first, second, remainders in itertools.product(
        DTYPES, DTYPES, DTYPES, (True, False)
    ):
        options = {
            "master_weight_dtype": master,
            "exp_avg_dtype": first,
            "exp_avg_sq_dtype": second,
            "store_param_remainders": remainders,
        }
        if bool(refusal(adam, **options)) != bool(refusal(ours, **options)):
            differing.append(options)
    assert not differing
