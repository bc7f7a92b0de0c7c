"""Run NeMo-RL's own set-up until Ray would start the first worker."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


class NextIsAWorkerError(Exception):
    """Raised at the point where NeMo-RL would start a worker."""


class Cluster:
    """Stands in for NeMo-RL's Ray cluster; returns a number of GPUs that do not exist."""

    _sorted_bundle_indices = None

    def __init__(self, bundle_ct_per_node_list: list[int], **more: object) -> None:
        self.gpus = bundle_ct_per_node_list

    def world_size(self) -> int:
        return sum(self.gpus)


class Anything:
    """Stands in for objects that are made before the policy: the logger, the rollout engine."""

    def __init__(self, *args: object, **more: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **more: None


def start_no_worker(*args: object, **more: object) -> None:
    raise NextIsAWorkerError


def policy_of(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = config["policy"] if isinstance(config, dict) else config.policy
    return found


def set_up(config: Any, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Run NeMo-RL's set-up until the first worker would start."""
    from nemo_rl.algorithms import grpo
    from nemo_rl.models.generation import configure_generation_config
    from nemo_rl.models.policy import lm_policy

    monkeypatch.chdir(folder)  # NeMo-RL makes the directories in the config.
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")  # NeMo-RL's container sets this name.
    monkeypatch.setattr(grpo, "RayVirtualCluster", Cluster)
    monkeypatch.setattr(grpo, "Logger", Anything)
    monkeypatch.setattr(grpo, "VllmGeneration", Anything)
    monkeypatch.setattr(lm_policy, "RayWorkerGroup", start_no_worker)
    monkeypatch.setattr(lm_policy, "RayWorkerBuilder", Anything)
    if hasattr(lm_policy, "RayQueue"):
        monkeypatch.setattr(lm_policy, "RayQueue", Anything)
    tokenizer: Any = SimpleNamespace(pad_token_id=0, eos_token_id=1)
    policy = policy_of(config)
    policy["generation"] = configure_generation_config(policy["generation"], tokenizer)
    rows: Any = [{}] * 64
    with pytest.raises(NextIsAWorkerError):
        grpo.setup(config, tokenizer, rows, rows)
