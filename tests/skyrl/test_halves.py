"""The audit of the weights that SkyRL's sources send, or SkyRL's extractors before 0.4."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from precision_shim.auditing import sent_weights

from ..processes.commands import command
from .support import batch, build, equal_streams, fsdp_worker, train_config, weights_sent
from .test_both_sides import received, since_0_4, vllm  # noqa: F401

pytestmark = pytest.mark.slow


def trained(checkpoint: Path) -> Any:
    """A worker with an engines' config, whose weights are exact in no 16-bit dtype."""
    worker = fsdp_worker("policy", checkpoint, "fp16")
    engines = train_config("generator.inference_engine.model_dtype=float16").generator
    with suppress(Exception):  # SkyRL's own init_weight_sync_state needs running engines
        asyncio.run(worker.init_weight_sync_state(None, engines.inference_engine))
    worker.forward_backward(batch(0))
    worker.optim_step()
    return worker


def written(folder: Path) -> sent_weights.Sent:
    (half,) = [one for _, one in sent_weights.read(str(folder))]
    assert isinstance(half, sent_weights.Sent)
    return half


def test_fsdps_weights(cpu: None, checkpoints: dict[str, Path], shim: Any, tmp_path: Path) -> None:
    settings = {"audit_dir": str(tmp_path), "loss_scale_init": 1.0}
    shim(settings=settings, export=False)
    worker = trained(checkpoints["float32"])
    off = weights_sent(worker, torch.float16)
    half = written(tmp_path)
    assert (half.asked, half.key) == ("float16", "generator.inference_engine.model_dtype")
    assert (half.subject, half.sync, half.rank) == ("policy", 1, 0)
    assert half.sent["weights"].dtypes == {"fp16": sum(one.numel() for one in off.values())}
    assert half.own["weights"].dtypes.keys() == {"fp32"}
    assert half.sent["weights"].exact is half.own["weights"].exact is False
    status, said, _ = command("audit", tmp_path)
    assert "contradiction" not in said
    with pytest.warns(match="weights-dtype: weights go out in bf16"):
        weights_sent(worker, torch.bfloat16)
    assert written(tmp_path).sync == 2
    status, said, _ = command("audit", tmp_path)
    assert status == 1
    assert "  contradiction, rank 0: weights-dtype: weights go out in bf16, the engine" in said


def test_off_nothing_is_written(
    cpu: None, checkpoints: dict[str, Path], shim: Any, tmp_path: Path
) -> None:
    shim(features="-audit", settings={"audit_dir": str(tmp_path)}, export=False)
    weights_sent(trained(checkpoints["float32"]), torch.float16)
    assert list(tmp_path.iterdir()) == []


def test_megatrons_weights(
    fused_adam: str, checkpoints: dict[str, Path], shim: Any, tmp_path: Path
) -> None:
    shim(settings={"audit_dir": str(tmp_path)}, export=False)
    worker = build(checkpoints["float32"], "trainer.bf16=false")
    with torch.no_grad():
        for chunk in worker.actor_module:
            for one in chunk.parameters():
                one.add_(torch.randn_like(one) * 1e-3)
    exported = worker.bridge.export_hf_weights(worker.actor_module, show_progress=False)
    expected = {name: one.detach().clone().half() for name, one in exported}
    try:
        from skyrl.backends.skyrl_train.weight_sync.sources import MegatronWeightSource
    except ImportError:
        from skyrl.backends.skyrl_train.workers.megatron.megatron_worker import (
            MegatronWeightExtractor,
        )

        extractor = MegatronWeightExtractor(
            bridge=worker.bridge,
            actor_module=worker.actor_module,
            enable_bucketing=False,
            bucket_size_threshold_GB=1.0,
            training_dtype=torch.float32,
        )
        sent = {
            name: tensor
            for chunk in extractor.extract_weights(torch.float16)
            for name, tensor in zip(chunk.names, chunk.tensors, strict=True)
        }
    else:
        sent = dict(MegatronWeightSource(worker.bridge, worker.actor_module, torch.float16))
    assert equal_streams(sent, expected)
    half = written(tmp_path)
    assert half.sent["weights"].dtypes == {"fp16": sum(one.numel() for one in sent.values())}
    assert half.own["weights"].dtypes.keys() == {"fp32"}
    assert half.sent["weights"].exact is half.own["weights"].exact is False


@since_0_4
@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_the_delta_syncs_own_rounding(
    checkpoints: dict[str, Path], shim: Any, tmp_path: Path, stored: str
) -> None:
    """The delta sync rounds the streamed weights again, to the base checkpoint's dtype."""
    from safetensors.torch import load_file

    base, folder = checkpoints[stored], tmp_path / "audit"
    shim(settings={"audit_dir": str(folder), "log": "quiet"}, export=False)
    weights = {
        name: one.float() + torch.randn(one.shape) * 1e-3
        for name, one in load_file(base / "model.safetensors").items()
    }
    received(base, weights, torch.float32, tmp_path)
    half = written(folder)
    assert half.then == {"bfloat16": "bf16", "float32": "fp32"}[stored]
    assert half.sent["weights"].dtypes.keys() == {"fp32"}
    assert half.sent["weights"].exact is (stored == "bfloat16")
