"""fp16 in verl 0.7.1's legacy Megatron workers, through their own update methods."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version

import precision_shim

from ..stand_ins.tiny_models import VOCABULARY
from .conftest import VERL
from .test_legacy_workers import ACTOR, OWNERS
from .test_legacy_workers import config as composed  # noqa: F401  (a fixture)

pytestmark = pytest.mark.skipif(
    not Version("0.7") <= VERL < Version("0.8"), reason="verl 0.8 has no legacy workers"
)

SEQUENCES, PROMPT, RESPONSE = 4, 3, 5


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpack sequences, as Megatron's local attention requires; stub the memory figures."""
    import verl.models.mcore as mcore

    own = mcore.get_mcore_forward_fn

    def unpacked(hf_config: Any) -> Any:
        forward = own(hf_config)

        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **{**kwargs, "data_format": "bshd"})

        return call

    monkeypatch.setattr(mcore, "get_mcore_forward_fn", unpacked)
    for name in ("max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cpu, name, lambda: 0, raising=False)


@pytest.fixture
def legacy(composed: Any) -> Callable[..., Legacy]:  # noqa: F811
    """Builds a real legacy worker."""
    return functools.partial(Legacy, composed)


def rollout(seed: int = 0) -> Any:
    """A batch like the trainer's argument of ``update_actor`` and ``update_critic``."""
    from verl import DataProto

    generator = torch.Generator().manual_seed(seed)
    length = PROMPT + RESPONSE
    ids = torch.randint(3, VOCABULARY, (SEQUENCES, length), generator=generator)
    noise = [torch.rand(SEQUENCES, RESPONSE, generator=generator) for _ in range(4)]
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "responses": ids[:, PROMPT:],
            "attention_mask": torch.ones_like(ids),
            "response_mask": torch.ones(SEQUENCES, RESPONSE, dtype=torch.long),
            "position_ids": torch.arange(length).expand(SEQUENCES, length).contiguous(),
            "old_log_probs": noise[0] - 4.5,
            "advantages": noise[1] - 0.5,
            "values": noise[2],
            "returns": noise[3],
        },
        meta_info={"temperature": 1.0, "global_token_num": [length] * SEQUENCES},
    )


class Legacy:
    """A real worker of 0.7.1, its model and its optimizer."""

    def __init__(self, compose: Any, subject: str, **overrides: Any) -> None:
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.megatron_workers import ActorRolloutRefWorker, CriticWorker

        extra = [
            setting
            for owner in OWNERS
            for setting in (
                f"++{owner}.megatron.dtype=float16",
                f"{owner}.ppo_mini_batch_size={SEQUENCES}",
                *(
                    f"++{owner}.optim.override_optimizer_config.{key}={value}"
                    for key, value in overrides.items()
                ),
            )
        ]
        place = "actor_rollout_ref.rollout"
        extra += [f"{place}.n=1", f"{place}.dtype=float16"]
        made = compose(*extra, f"{ACTOR}.use_kl_loss=False")
        self.subject = subject
        if subject == "actor":
            self.worker = ActorRolloutRefWorker(made.actor_rollout_ref, "actor")
        else:
            self.worker = CriticWorker(omega_conf_to_dataclass(made.critic))
        self.worker.init_model()
        self.optimizer = getattr(self.worker, f"{subject}_optimizer")
        self.module = getattr(self.worker, f"{subject}_module")[0]

    @property
    def scaler(self) -> Any:
        return self.optimizer.chained_optimizers[0].grad_scaler

    def parameters(self) -> torch.Tensor:
        return torch.cat([p.detach().float().flatten() for p in self.module.parameters()])

    def update(self, seed: int = 0) -> dict[str, Any]:
        """Call the worker's ``update_actor`` or ``update_critic``; returns its metrics."""
        method = getattr(self.worker, f"update_{self.subject}")
        return dict(method(rollout(seed)).meta_info["metrics"])


@pytest.mark.parametrize("subject", ["actor", "critic"])
def test_trains(legacy: Any, shim: Any, subject: str) -> None:
    """The worker skips steps while the scale is too high, and then trains."""
    shim()
    one = legacy(subject, initial_loss_scale=2.0**40, hysteresis=1)
    start = one.parameters()
    for step in (1, 2):
        metrics = one.update(step)
        assert metrics[f"{subject}/grad_norm"] == [pytest.approx(math.nan, nan_ok=True)]
        assert metrics[f"{subject}/loss_scale"] == 2.0 ** (41 - step)
        assert metrics[f"{subject}/skipped_steps"] == step
        assert torch.equal(one.parameters(), start)
    for key, value in metrics.items():  # the trainer averages metrics so
        assert np.isnan(np.mean(value)) == key.endswith("grad_norm")
    one.scaler.load_state_dict(
        {"scale": torch.tensor([256.0]), "growth_tracker": 0, "hysteresis_tracker": 1}
    )
    metrics = one.update(3)
    assert math.isfinite(metrics[f"{subject}/grad_norm"][0])
    assert metrics[f"{subject}/loss_scale"] == 256.0
    assert metrics[f"{subject}/skipped_steps"] == 2.0
    assert not torch.equal(one.parameters(), start)


def test_settings(legacy: Any, shim: Any) -> None:
    shim(settings={"loss_scale_init": 64.0, "growth_interval": 1, "growth_factor": 4.0})
    one = legacy("actor")
    scales = [one.update(step)["actor/loss_scale"] for step in range(3)]
    assert scales == [64.0, 256.0, 1024.0]
    said = [str(one) for one in precision_shim.status().decisions]
    assert any("verl actor: fp16-scaling" in line for line in said)
