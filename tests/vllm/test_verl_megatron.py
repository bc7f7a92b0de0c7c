"""verl's Megatron engine and the real vLLM: mbridge loads and exports weights, bit by bit.

Stand-ins: TransformerEngine's, and the translated names of the norms in ``local_layers``.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ..megatron_bridge import import_megatron_bridge
from ..tiny_models import make_checkpoint
from ..verl.support import engine, local_layers
from .engines import load, read, ways


@pytest.fixture(scope="module")
def imported(both_sides: ModuleType) -> Iterator[None]:
    """verl's engine, imported once for all."""
    from examples.demo.rl.vllm_on_cpu import keep_weights

    keep_weights()
    import_megatron_bridge()
    import verl.utils.megatron.optimizer
    import verl.utils.megatron_utils
    import verl.workers.engine.megatron.transformer_impl  # noqa: F401

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu, "empty_cache", lambda: None, raising=False)
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """The engine's checkpoint, the trainer's checkpoint, and the trainer's weights in fp32."""
    from transformers import AutoModelForCausalLM

    first = make_checkpoint(tmp_path_factory.mktemp("model"), width=64)
    second = tmp_path_factory.mktemp("trained") / "model"
    shutil.copytree(first, second)
    model = AutoModelForCausalLM.from_pretrained(first, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for one in model.parameters():
            one.add_(torch.randn_like(one) * 2**-6)
    model.save_pretrained(second)
    return first, second, {name: one.detach() for name, one in model.state_dict().items()}


def sent(checkpoint: Path, dtype: str) -> list[tuple[str, torch.Tensor]]:
    """What verl's engine sends after it has loaded a checkpoint."""
    from precision_shim.testing import (
        megatron_on_cpu,
        model_parallel,
        stand_in_transformer_engine,
    )

    with (
        stand_in_transformer_engine("2.11.0"),
        megatron_on_cpu(),
        model_parallel(),
        local_layers(weights=True),
    ):
        one = engine(checkpoint, dtype)
        one.initialize()
        stream, _ = one.get_per_tensor_param()
        return [(name, weight.detach().clone()) for name, weight in stream]


DTYPES = ("float16", "bfloat16")


@pytest.fixture(scope="module")
def streams(imported: None, models: Any) -> dict[str, list[tuple[str, torch.Tensor]]]:
    """What is sent, by dtype: before the first engine, whose process group stays."""
    return {dtype: sent(models[1], dtype) for dtype in DTYPES}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_engine_holds_the_trainers_weights_rounded_once(
    both_sides: ModuleType, streams: dict[str, Any], models: Any, dtype: str
) -> None:
    checkpoint, _, masters = models
    with both_sides.engine(checkpoint, dtype, 32) as llm:
        (before,) = llm.collective_rpc(read)
        llm.collective_rpc(load, args=(streams[dtype],))
        (held,) = llm.collective_rpc(read)
    assert {one.dtype for one in held.values()} == {getattr(torch, dtype)}
    assert all(not torch.equal(before[name], one) for name, one in held.items())
    assert "once" in ways(held, masters)
    assert ("over bf16" in ways(held, masters)) is (dtype == "bfloat16")
