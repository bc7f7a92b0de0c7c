"""The audit of torchao's optimizers; torchao is installed because NeMo-Automodel imports it."""

from __future__ import annotations

import pytest
import torch

import precision_shim

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("stochastic", [False, True])
def test_stochastic_rounding_loses_no_small_updates(stochastic: bool, dtype: torch.dtype) -> None:
    optim = pytest.importorskip("torchao.optim")
    model = torch.nn.Linear(8, 8, dtype=dtype)
    torch.nn.init.ones_(model.weight)
    optimizer = optim.AdamW8bit(
        model.parameters(), lr=1e-3, weight_decay=0.0, bf16_stochastic_round=stochastic
    )
    with torch.compiler.set_stance("force_eager"):  # it compiles its steps
        for _ in range(20):
            model(torch.ones(1, 8, dtype=dtype)).sum().backward()
            optimizer.step()
    noted = "no-master" in {note.code for note in precision_shim.audit(model, optimizer).notes}
    assert noted == (not stochastic or dtype is torch.float16)
    if dtype is torch.bfloat16:  # an update is a quarter of the distance to the next weight
        assert bool((model.weight < 1).any()) == stochastic


def test_codes_in_8_bits_are_not_fp8() -> None:
    optim = pytest.importorskip("torchao.optim")
    model = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
    optimizer = optim.AdamW8bit(model.parameters(), lr=1e-3)
    with torch.compiler.set_stance("force_eager"):
        model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    (part,) = precision_shim.audit(model, optimizer).parts
    assert part.components["exp_avg"].dtypes == ("bf16", "fp32", "uint8")
