"""verl 0.7.1's default workers: real classes, their own init_model, verl's shipped config."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

import precision_shim

from .conftest import VERL
from .support import CPU_FIELDS

pytestmark = pytest.mark.skipif(
    not Version("0.7") <= VERL < Version("0.8"),
    reason="verl 0.8 has no legacy workers; 0.6's are covered by test_untested_version",
)

ACTOR = "actor_rollout_ref.actor"
OWNERS = (ACTOR, "critic")


@pytest.fixture
def config(
    fused_adam: str, checkpoint: Path, value_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Composes verl's ppo_megatron_trainer config with tiny models and further overrides."""
    import verl.trainer.config as shipped
    import verl.workers.megatron_workers as workers
    from hydra import compose, initialize_config_dir

    # aggressive_empty_cache reports the device's memory cache, which a CPU lacks.
    monkeypatch.setattr(workers, "aggressive_empty_cache", lambda **kwargs: None)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    common = [
        f"actor_rollout_ref.model.path={checkpoint}",
        f"critic.model.path={value_checkpoint}",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
        "critic.ppo_micro_batch_size_per_gpu=1",
        f"{ACTOR}.optim.total_training_steps=10",
        "critic.optim.total_training_steps=10",
        f"++{ACTOR}.load_weight=False",
        "++critic.load_weight=False",
    ]
    common += [
        f"++{owner}.megatron.override_transformer_config.{key}={value}"
        for key, value in CPU_FIELDS.items()
        for owner in OWNERS
    ]

    def make(*overrides: str) -> Any:
        with initialize_config_dir(os.path.dirname(shipped.__file__), version_base=None):
            return compose("ppo_megatron_trainer", overrides=[*common, *overrides])

    return make


def both(config: Any) -> dict[str, tuple[Any, Any]]:
    """The model chunk and the optimizer of a real actor and of a real critic."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.megatron_workers import ActorRolloutRefWorker, CriticWorker

    actor = ActorRolloutRefWorker(config.actor_rollout_ref, "actor")
    actor.init_model()
    critic = CriticWorker(omega_conf_to_dataclass(config.critic))
    critic.init_model()
    return {
        "actor": (actor.actor_module[0], actor.actor_optimizer),
        "critic": (critic.critic_module[0], critic.critic_optimizer),
    }


def test_actor_and_critic_follow_the_model(config: Any, shim: Any) -> None:
    shim()
    extra = [f"++{owner}.optim.override_optimizer_config.adam_beta2=0.95" for owner in OWNERS]
    for subject, (module, optimizer) in both(config(*extra)).items():
        assert module.buffers[0].grad_data.dtype is torch.bfloat16
        assert optimizer.config.use_precision_aware_optimizer
        assert optimizer.config.exp_avg_dtype is torch.bfloat16
        assert optimizer.config.exp_avg_sq_dtype is torch.bfloat16
        assert any(
            d.subject == subject and d.feature == "bf16-dispatch"
            for d in precision_shim.status().decisions
        )


def test_opt_in_fields_in_yaml(config: Any, shim: Any) -> None:
    """verl 0.9's opt-in fields work in the YAML of 0.7.1."""
    shim(settings={"optimizer_states": "as-configured"})
    extra = [
        f"+{owner}.optim.{key}={value}"
        for owner in OWNERS
        for key, value in {
            "use_precision_aware_optimizer": True,
            "main_grads_dtype": "bf16",
            "exp_avg_dtype": "bf16",
            "exp_avg_sq_dtype": "fp32",
        }.items()
    ]
    for module, optimizer in both(config(*extra)).values():
        assert module.buffers[0].grad_data.dtype is torch.bfloat16
        assert optimizer.config.exp_avg_dtype is torch.bfloat16
        assert optimizer.config.exp_avg_sq_dtype is torch.float32
