"""A training script like AReaL's examples, up to its rollout: prints what the trainer reports.

AReaL's own ``PPOTrainer`` reads the config, makes the scheduler and starts the workers (or, under
AReaL's launcher, makes the engine in the process of torchrun). The script makes the calls of
``PPOTrainer.train`` with batches of its own, because a CPU has no rollout engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

LENGTH = 8


def batch(step: int) -> list[dict[str, Any]]:
    """Two trajectories of ``LENGTH`` tokens; the first one's reward overflows in step 1."""
    import torch

    torch.manual_seed(step)
    rewards = (1e9 if step == 1 else 1.0, 1.0)
    ones = torch.ones(1, LENGTH, dtype=torch.int32)
    return [
        {
            "input_ids": torch.randint(0, 32, (1, LENGTH), dtype=torch.int32),
            "attention_mask": ones.bool(),
            "loss_mask": ones,
            "logprobs": torch.full((1, LENGTH), -3.5),
            "versions": torch.zeros_like(ones),
            "rewards": torch.tensor([reward]),
        }
        for reward in rewards
    ]


@contextlib.contextmanager
def trainer_of(config: Any) -> Iterator[Any]:
    """AReaL's trainer with the parts of its ``__init__`` that start the training workers."""
    from areal.trainer.rl_trainer import PPOTrainer
    from areal.utils.environ import is_single_controller

    made: Any = object.__new__(PPOTrainer)
    made.config, made.scheduler = config, None
    if is_single_controller():
        made.scheduler = made._init_scheduler()
        made.scheduler.startup_timeout = 300.0  # the workers import for a minute on a busy machine
    try:
        yield made
    finally:
        if made.scheduler is not None:
            made.scheduler.delete_workers()


def start(make: Any, section: Any, role: str) -> Any:
    """Make the engine or the controller of a role, and build its model."""
    from areal.api import FinetuneSpec
    from areal.api.alloc_mode import ModelAllocation

    engine = make(section, ModelAllocation.from_str(section.backend, name=role))
    spec = FinetuneSpec(total_train_epochs=1, dataset_size=8, train_batch_size=1)
    engine.initialize(addr=None, ft_spec=spec, role=role)
    return engine


def seen(engine: Any) -> dict[str, Any]:
    """What the process of the role's first worker has of the shim."""
    call = getattr(engine, "_custom_function_call", None)
    found: dict[str, Any] = call("seen_by_the_test") if call else engine.seen_by_the_test()
    return found


def main(argv: list[str]) -> dict[str, Any]:
    from areal.api.cli_args import GRPOConfig, load_expr_config

    config, _ = load_expr_config(argv, GRPOConfig)
    import precision_shim
    from tests.every_framework.lacking import answers

    found: dict[str, Any] = {
        "rollout": config.sglang.dtype,
        "decided": [one.chosen for one in precision_shim.status().decisions],
    }
    asked = answers()
    with trainer_of(config) as trainer:
        actor = start(trainer._create_train_engine, config.actor, "actor")
        found["steps"] = []
        for step in range(3):
            actor.ppo_update(actor.compute_advantages(batch(step)))
            actor.step_lr_scheduler()
            found["steps"].append(actor.export_stats())
        found["actor"] = seen(actor)
        if config.critic is not None:
            found["critic"] = seen(start(trainer._create_critic, config.critic, "critic"))
    found["asked"] = asked
    return found


if __name__ == "__main__":
    status = 1
    try:
        print("FOUND " + json.dumps(main(sys.argv[1:])), flush=True)
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # threads of gloo and AReaL may prevent a normal exit
