"""Jobs of a few steps with all their processes; skipped if vLLM or verl is not installed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from examples.demo import rl
from examples.demo.rl.jobs import Job

HERE = Path(__file__).parent

if rl.unavailable():
    collect_ignore_glob = ["test_*.py"]
elif importlib.util.find_spec("megatron") is None:
    collect_ignore = ["test_megatron.py"]

PROMPTS, ANSWERS = 4, 4
LOOPS = "- {name: seeded, _target_: tests.rl.seeded.Loop}\n"
ROLLOUT = "actor_rollout_ref.rollout"
KEYS = (
    f"data.train_batch_size={PROMPTS}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
    f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={PROMPTS * ANSWERS}",
    f"{ROLLOUT}.n={ANSWERS}",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu={PROMPTS * ANSWERS}",
    f"{ROLLOUT}.max_num_seqs=1",
    f"{ROLLOUT}.agent.default_agent_loop=seeded",
    f"trainer.v1.sampler.custom_sampler.path={HERE / 'seeded.py'}",
)
NOT_REPEATED = ("timing", "perf/", "actor/perf/", "critic/perf/")
"""Metrics of time and memory, which differ between equal runs."""


class Patient(rl.Limits):
    """Time limits for busy machines, below pytest's own time limit."""

    first, step, end = 800.0, 120.0, 120.0


@dataclass(frozen=True)
class Probed(Job):
    """A job whose processes write their weights to files."""

    probes: Path = Path()
    variables: dict[str, str] = field(default_factory=dict)

    def environment(self, folder: Path) -> dict[str, str]:
        """The demo's environment variables, and those of the probes."""
        ours = {"VERL_USE_EXTERNAL_MODULES": "tests.rl.probes", "RL_PROBES": str(self.probes)}
        return {**super().environment(folder), **ours, **self.variables}


@dataclass(frozen=True)
class Ran:
    """The results of a job: verl's logged metrics of each step, and the probes' folder."""

    metrics: dict[int, dict[str, Any]]
    probes: Path
    log: str

    def weights(self, side: str, rank: int = 0) -> list[dict[str, Any]]:
        """The weights of ``trainer`` or ``engine``, one after another sync.

        Args:
            side: on Megatron also ``optimizer``, whose states a rank holds.
            rank: the trainer's, or number of the engine.
        """
        import torch

        files = sorted(
            self.probes.glob(f"{side}{rank}-*.pt"), key=lambda one: int(one.stem.split("-")[1])
        )
        return [torch.load(one) for one in files]


@pytest.fixture(scope="session")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ran]:
    """Runs a job to its end."""

    def run(
        trainer: str,
        rollout: str,
        steps: int,
        *keys: str,
        kind: type[Probed] = Probed,
        **variables: str,
    ) -> Ran:
        folder = tmp_path_factory.mktemp("rl")
        (folder / "loops.yaml").write_text(LOOPS, encoding="utf-8")
        job = kind("job", trainer, rollout, probes=folder, variables=variables)
        loops = f"{ROLLOUT}.agent.agent_loop_config_path={folder / 'loops.yaml'}"
        rl.run(job, folder, steps, limits=Patient, keys=(*KEYS, loops, *keys))
        lines = map(json.loads, (folder / "job.jsonl").read_text(encoding="utf-8").splitlines())
        metrics = {
            line["step"]: {
                name: value
                for name, value in line["data"].items()
                if not name.startswith(NOT_REPEATED)
            }
            for line in lines
        }
        return Ran(metrics, folder, (folder / "job.log").read_text(encoding="utf-8"))

    return run
