"""fp16 on Megatron: overflows, skipped steps, and the scaler's settings."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

import precision_shim
from precision_shim.errors import PrecisionShimWarning

from .conftest import SKYRL
from .support import batch, build, fsdp_worker, metrics_of

KWARGS = "trainer.policy.megatron_config.optimizer_config_kwargs"
FP16 = "trainer.bf16=false"


@pytest.fixture
def make(fused_adam: str, checkpoints: dict[str, Path]) -> Callable[..., Any]:
    """Build an fp16 policy worker from an fp16 checkpoint."""
    return lambda *overrides: build(checkpoints["float16"], FP16, *overrides)


def scaler(worker: Any) -> Any:
    (found,) = getattr(worker.optimizer, "chained_optimizers", [worker.optimizer])
    return found.grad_scaler


def train(worker: Any, seed: int, advantage: float = 1.0) -> tuple[dict[str, float], Any]:
    """Run one forward and backward pass and one step by SkyRL's own methods."""
    found = metrics_of(worker.forward_backward(batch(seed, advantage=advantage)))
    return found, worker.optim_step()


def parameters(worker: Any) -> torch.Tensor:
    return torch.cat(
        [one.detach().float().flatten() for m in worker.actor_module for one in m.parameters()]
    )


def test_an_overflow_is_skipped_and_shown(
    make: Any, shim: Any, caplog: pytest.LogCaptureFixture
) -> None:
    shim()
    worker = make(f"{KWARGS}.initial_loss_scale=1024")
    first, norm = train(worker, 0)
    assert math.isfinite(norm)
    assert (first["loss_scale"], first["skipped_steps"]) == (1024.0, 0.0)
    before, scale = parameters(worker), float(scaler(worker).scale)
    assert scale == 1024
    with caplog.at_level(logging.WARNING, "precision_shim"):
        for seed in (1, 2):  # hysteresis keeps the scale at the first overflow
            _, norm = train(worker, seed, advantage=1e9)
            assert isinstance(norm, float)
            assert math.isnan(norm)
    assert caplog.text.count("fp16 overflow at loss scale 1024") == 2
    assert torch.equal(before, parameters(worker)), "nothing was stepped"
    assert float(scaler(worker).scale) == scale / 2
    after, norm = train(worker, 3)
    assert after["skipped_steps"] == 2.0
    assert after["loss_scale"] == scale
    assert math.isfinite(norm)
    assert not torch.equal(before, parameters(worker))
    assert train(worker, 4)[0]["loss_scale"] == scale / 2


def test_with_dispatch_off_the_config_is_skyrls_and_named(make: Any, shim: Any) -> None:
    """SkyRL sets bf16 for every model, so bf16 in the config does not count as the user's."""
    shim(features=["-bf16-dispatch"])
    with (
        pytest.warns(PrecisionShimWarning, match="fp16=False, bf16=True, but the model is fp16"),
        pytest.warns(PrecisionShimWarning, match="OptimizerConfig is for bf16 parameters"),
    ):
        assert scaler(make()) is None
    found = [one.because for one in precision_shim.status().decisions if "no loss" in one.chosen]
    assert found == ["the optimizer's config has fp16=False"]


def test_losses_and_norms_are_unscaled(make: Any, shim: Any) -> None:
    """A 32nd of the loss at 32 times the scale gives exactly a 32nd of all figures."""
    shim()
    alone = "trainer.algorithm.use_kl_loss=false"  # makes the loss a multiple of the advantage
    one = train(make(alone, f"{KWARGS}.initial_loss_scale=16"), 0)
    two = train(make(alone, f"{KWARGS}.initial_loss_scale=512"), 0, advantage=2.0**-5)
    assert one[0]["final_loss"] == two[0]["final_loss"] * 2.0**5 != 0.0
    assert one[1] == two[1] * 2.0**5 > 0.0


def test_settings_reach_megatrons_scaler(make: Any, shim: Any) -> None:
    shim(settings={"loss_scale_init": 1024, "growth_interval": 7, "backoff_factor": 0.25})
    found = scaler(make())
    assert float(found.scale) == 1024
    assert found.growth_interval == 7
    assert found.backoff_factor == 0.25
    # A value in SkyRL's own config overrides the shim's variables.
    assert float(scaler(make(f"{KWARGS}.initial_loss_scale=64")).scale) == 64


@pytest.mark.skipif(
    Version("0.4") <= SKYRL, reason="0.4 has no MegatronWeightExtractor and no table of sizes"
)
def test_sizes_of_fp16_weights(make: Any, shim: Any) -> None:
    """Weights are sent to the engines in buckets by size; SkyRL's table of sizes lacks fp16.

    SkyRL reads its table of sizes only if the training dtype is fp32 (``trainer.bf16=false``).
    """
    from skyrl.backends.skyrl_train.workers.megatron.megatron_worker import MegatronWeightExtractor

    shim()
    worker = make()
    extractor = MegatronWeightExtractor(
        bridge=worker.bridge,
        actor_module=worker.actor_module,
        enable_bucketing=True,
        bucket_size_threshold_GB=1.0,
        training_dtype=torch.float32,
    )
    extractor._init_param_buckets()
    tasks = worker.bridge.get_conversion_tasks(worker.actor_module)
    assert extractor.bridge is worker.bridge
    assert sorted(i for group in extractor.bucket_index_groups for i in group) == list(
        range(len(tasks))
    )
    assert precision_shim.status().enabled


@pytest.mark.skipif(Version("0.3") > SKYRL, reason="0.2 clips no head by itself")
def test_skyrls_own_step_for_a_prediction_head_is_counted(
    make: Any, shim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SkyRL's own ``step`` calls the parts of Megatron's step one by one."""
    from skyrl.backends.skyrl_train.mtp import grad_clip

    monkeypatch.setattr(grad_clip, "is_mtp_param_name", lambda name: "output_layer" in name)
    shim()
    worker = make(f"{KWARGS}.initial_loss_scale=1024", f"{KWARGS}.hysteresis=1")
    assert grad_clip.install_mtp_separate_grad_clip(worker.optimizer, worker.actor_module)
    own = worker.optimizer.step
    _, norm = train(worker, 0)
    assert math.isfinite(norm)
    before = parameters(worker)
    _, norm = train(worker, 1, advantage=1e9)
    assert math.isnan(norm)
    assert torch.equal(parameters(worker), before)
    found, _ = train(worker, 2)
    assert (found["skipped_steps"], found["loss_scale"]) == (1.0, 1024.0)
    assert float(scaler(worker).scale) == 512
    assert worker.optimizer.step is own


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, float]]:
    """Take a step by the Tinker server's own backend and dispatch; returns the server's answer."""
    backend = pytest.importorskip(
        "skyrl.backends.skyrl_train_backend", reason="the Tinker server's packages are not here"
    )
    from skyrl.backends.skyrl_train.distributed.dispatch import ActorInfo, MeshRank
    from skyrl.backends.skyrl_train.workers import worker_dispatch as module

    # The worker is an object in this process, so its results need no ray.get.
    monkeypatch.setattr(module, "ray", SimpleNamespace(get=lambda refs: refs))
    alone = MeshRank(dp=0, sp=0, tp=0, pp=0, world_size=1, dp_size=1, pp_size=1)
    servers: dict[int, Any] = {}

    def backend_of(worker: Any) -> Any:
        def call(dispatch: str, method: str, *args: Any, **kwargs: Any) -> list[Any]:
            return [getattr(worker, method)(*args, **kwargs)]

        dispatch = object.__new__(module.WorkerDispatch)
        dispatch._actor_groups = {
            "policy": SimpleNamespace(
                async_run_ray_method=call, actor_infos=[ActorInfo(handle=None, rank=alone)]
            )
        }
        for name in ("_ensure_on_gpu", "ensure_active_adapter", "_save_memory_snapshot", "set_lr"):
            setattr(dispatch, name, lambda *args, **kwargs: None)
        server = object.__new__(backend.SkyRLTrainBackend)
        server._model_id, server._dispatch = "m", dispatch
        server.config = SimpleNamespace(runtime_role="combined")  # SkyRL reads this key from 0.4 on
        server._get_role = lambda model_id: "policy"
        return server

    def step(worker: Any, advantage: float) -> dict[str, float]:
        server = servers.setdefault(id(worker), backend_of(worker))
        server._dispatch.forward_backward("policy", batch(0, advantage=advantage))
        request = SimpleNamespace(adam_params=SimpleNamespace(learning_rate=1e-3))
        return dict(server.optim_step("m", request).metrics)

    return step


RATE = {"skyrl.ai/learning_rate": 1e-3}


def test_the_tinker_servers_answer_has_no_nan(make: Any, shim: Any, answer: Any) -> None:
    """JSON has no NaN: the server would fail at each skipped step, even at the first."""
    shim()
    worker = make(f"{KWARGS}.initial_loss_scale=1024")
    assert answer(worker, 1e9) == {"skyrl.ai/skipped_step": 1.0, **RATE}
    found = answer(worker, 1.0)
    assert math.isfinite(found.pop("skyrl.ai/grad_norm"))
    assert found == RATE


@pytest.mark.parametrize("strategy", ["megatron", "fsdp"])
def test_the_tinker_servers_answer_without_a_scaler(
    fused_adam: str, checkpoints: Any, shim: Any, answer: Any, strategy: str
) -> None:
    """Broken gradients of a bf16 model do not count as a skipped step: SkyRL fails on them."""
    shim()
    if strategy == "megatron":
        worker = build(checkpoints["bfloat16"])
    else:
        worker = fsdp_worker("policy", checkpoints["float32"], None)
    found = answer(worker, math.inf)
    assert not math.isfinite(found.pop("skyrl.ai/grad_norm"))
    assert found == RATE
