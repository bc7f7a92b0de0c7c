"""Runs verl's ``run_ppo`` for one job, up to the Ray actor that receives the config.

verl accepts a user's own runner. ``Runner`` writes the dtype of the rollout's engine.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray

import precision_shim
from tests.every_framework.both_sides import FOLLOW
from tests.every_framework.shim_warnings import ours
from tests.verl.test_both_sides import ROLLOUT, composed, side

CLUSTER = tempfile.mkdtemp(prefix="ray", dir="/tmp")


class Runner:
    """Replaces verl's ``TaskRunner``."""

    @classmethod
    def remote(cls) -> Any:
        """Return an actor; verl calls this method to make a task runner."""
        return ray.remote(num_cpus=1)(cls).remote()

    def run(self, config: Any) -> None:
        """Write the rollout's dtype that the actor's process reads from the config."""
        from verl.utils.config import omega_conf_to_dataclass

        import precision_shim

        made = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
        states = precision_shim.status().to_dict()["frameworks"]["verl"]["seams"]
        named = [
            one["state"] for one in states if one["target"].endswith("RolloutConfig.__post_init__")
        ]
        found = {"rollout": made.dtype, "named": named}
        Path(config.trainer.default_local_dir).write_text(json.dumps(found), encoding="utf-8")


def main() -> None:
    """Print the driver's warnings, and the dtype that the actor reads."""
    answer = Path(sys.argv[1]) / "answer.json"
    words = [*side("actor", "fp16"), f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.dtype=bf16"]
    options = {"address": "local", "include_dashboard": "false", "_temp_dir": CLUSTER}
    words += [f"+ray_kwargs.ray_init.{key}={value}" for key, value in options.items()]
    words += ["ray_kwargs.ray_init.num_cpus=2", f"trainer.default_local_dir={answer}"]
    precision_shim.install(frameworks=["verl"], settings=FOLLOW, export=False)
    from verl.trainer.main_ppo import run_ppo
    from verl.utils.device import auto_set_device  # after install(), to get the wrapper

    with composed(words) as config, ours() as told:
        auto_set_device(config)
        run_ppo(config, task_runner_class=Runner)
    found = json.loads(answer.read_text(encoding="utf-8"))
    print("FOUND", json.dumps({**found, "told": told}))


if __name__ == "__main__":
    main()
