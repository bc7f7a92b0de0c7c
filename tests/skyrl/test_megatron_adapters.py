"""fp16 on Megatron with SkyRL's store of LoRA adapters, whose gradients wait for their step."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from .conftest import SKYRL
from .support import batch, build

pytestmark = pytest.mark.skipif(Version("0.3") > SKYRL, reason="0.2 has no store of LoRA adapters")

KWARGS = "trainer.policy.megatron_config.optimizer_config_kwargs"


@pytest.fixture
def make(
    fused_adam: str, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Build an fp16 policy worker with the real store and two adapters, ``a`` and ``b``.

    LoRA's layers need TransformerEngine; here an adapter is the whole model, which the store
    handles alike once it does not ask for the names.
    """
    from skyrl.backends.skyrl_train.workers.megatron import adapter_store
    from skyrl.backends.skyrl_train.workers.megatron import megatron_worker as module

    init = module.MegatronPolicyWorkerBase.__init__

    def with_store(self: Any, **kwargs: Any) -> None:
        init(self, **kwargs)
        self.adapter_store = module.AdapterStore()

    monkeypatch.setattr(module.MegatronPolicyWorkerBase, "__init__", with_store)
    monkeypatch.setattr(adapter_store, "_expected_lora_param_check", lambda chunks: None)

    def worker() -> Any:
        scaler = ("initial_loss_scale=1024", "hysteresis=1")
        made = build(
            checkpoints["float16"],
            "trainer.bf16=false",
            *(f"{KWARGS}.{one}" for one in scaler),
        )
        for one in adapter_store.iter_opts(made.optimizer):
            one._init_optimizer_states_with_dummy_values()
        made.register_pristine_adapter()
        for name in ("a", "b"):
            made.register_adapter(name)
        return made

    return worker


def scale(worker: Any) -> float:
    return float(worker.optimizer.get_loss_scale())


def swap_offloaded(worker: Any, name: str) -> None:
    """Swap while the gradients are offloaded, as colocated workers do between two requests."""
    store, chunks = worker.adapter_store, worker.actor_module
    store.park_grads(chunks)
    buffers = [buffer for chunk in chunks for buffer in chunk.buffers]
    sizes = [one.grad_data.storage().size() for one in buffers]
    for one in buffers:
        one.grad_data.storage().resize_(0)
    worker.swap_to_adapter(name)
    for one, size in zip(buffers, sizes, strict=True):
        one.grad_data.storage().resize_(size)
        one.grad_data.zero_()
    store.unpark_grads(chunks)


def parameters(worker: Any) -> torch.Tensor:
    return torch.cat(
        [one.detach().float().flatten() for m in worker.actor_module for one in m.parameters()]
    )


@pytest.mark.parametrize("offloads", [False, True], ids=["", "offloaded"])
def test_gradients_that_wait_while_another_adapter_moves_the_scale(
    make: Any, shim: Any, offloads: bool
) -> None:
    """They were scaled with the old scale, and the step divides by the new one."""
    shim()
    alone = make()
    alone.swap_to_adapter("a")
    alone.forward_backward(batch(0))
    norm = alone.optim_step()
    assert math.isfinite(norm)

    worker = make()
    if offloads and not hasattr(worker.adapter_store, "park_grads"):
        pytest.skip("from 0.4 the store keeps gradients over an offload")
    swap = swap_offloaded if offloads else type(worker).swap_to_adapter
    worker.swap_to_adapter("a")
    worker.forward_backward(batch(0))
    swap(worker, "b")
    worker.forward_backward(batch(1, advantage=1e9))
    assert math.isnan(worker.optim_step())
    assert scale(worker) == 512.0
    swap(worker, "a")
    assert worker.optim_step() == norm
    assert torch.equal(parameters(worker), parameters(alone))
