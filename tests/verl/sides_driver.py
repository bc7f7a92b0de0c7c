"""Runs verl's ``run_ppo`` for some pairs of dtypes, up to the Ray actor that receives the config.

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
from tests.every_framework.both_sides import PAIRS
from tests.every_framework.shim_warnings import ours
from tests.verl.test_both_sides import ROLLOUT, composed, side

CLUSTER = tempfile.mkdtemp(prefix="ray", dir="/tmp")


class Runner:
    """Replaces verl's ``TaskRunner``; all jobs share one actor."""

    _actor: Any = None

    @classmethod
    def remote(cls) -> Any:
        """Return the actor; verl calls this method to make a task runner."""
        if cls._actor is None:
            cls._actor = ray.remote(num_cpus=1)(cls).remote()
        return cls._actor

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


def run(folder: Path, actor: str, rollout: str, setting: str) -> dict[str, Any]:
    """Run one job; returns the driver's warnings, and the dtype that the actor reads."""
    answer = folder / "answer.json"
    words = [*side("actor", actor), f"{ROLLOUT}.name=vllm", f"trainer.default_local_dir={answer}"]
    words.append(f"{ROLLOUT}.dtype={rollout}")
    options = {"address": "local", "include_dashboard": "false", "_temp_dir": CLUSTER}
    words += [f"+ray_kwargs.ray_init.{key}={value}" for key, value in options.items()]
    words.append("ray_kwargs.ray_init.num_cpus=2")
    precision_shim.uninstall()
    precision_shim.install(frameworks=["verl"], settings={"rollout": setting}, export=False)
    from verl.trainer.main_ppo import run_ppo
    from verl.utils.device import auto_set_device  # after install(), to get the wrapper

    with composed(words) as config, ours() as told:
        auto_set_device(config)
        run_ppo(config, task_runner_class=Runner)
    found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return {**found, "told": told}


def main() -> None:
    """Print the results by actor, rollout and setting."""
    folder = Path(sys.argv[1])
    found = {
        f"{actor} {rollout} {setting}": run(folder, actor, rollout, setting)
        for setting in ("tell", "follow")
        for actor, rollout in PAIRS[:3]
    }
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main()
