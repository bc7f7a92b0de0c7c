"""The stand-ins beneath verl's Megatron engine: Megatron's own layers learn from verl's batches."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.version import Version

from .conftest import VERL
from .megatron_fp16_support import Training


@pytest.mark.skipif(Version("0.7") > VERL, reason="verl 0.6's engine: test_untested_version")
def test_attention_learns(
    fused_adam: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row of queries, keys and values gets a gradient: the mask does not hide all tokens."""
    one = Training(checkpoint, monkeypatch, dtype="bfloat16")
    seen = {}
    step = one.engine.optimizer_step

    def noted() -> float:
        (chunk,) = one.engine.module
        seen.update({n: p.main_grad.clone() for n, p in chunk.named_parameters()})
        return float(step())

    monkeypatch.setattr(one.engine, "optimizer_step", noted)
    one.train()
    attending = {n: grad for n, grad in seen.items() if n.endswith("linear_qkv.weight")}
    assert attending
    for name, grad in attending.items():
        assert (grad != 0).any(dim=1).all(), name
