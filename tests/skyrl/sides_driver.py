"""Runs SkyRL's ``main`` for some pairs of dtypes, up to the Ray actor that receives the config.

SkyRL's users may replace its ``skyrl_entrypoint`` by their own entry point. ``Entry`` stores the
dtypes with which the engines and the reference model would start.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

import pytest
import ray
from skyrl.train.entrypoints import main_base

import precision_shim
from tests.every_framework.both_sides import PAIRS
from tests.every_framework.shim_warnings import ours
from tests.processes.forks import WORKER_PYTHON
from tests.processes.ray_cluster import unwatched
from tests.skyrl.test_both_sides import KEY, on_fsdp
from tests.skyrl.vllm_names import engine_dtype, put_in_place

LIKE_A_CPU = ("trainer.flash_attn=false", "trainer.logger=console")


@ray.remote(num_cpus=1)
def read_back(config: Any) -> dict[str, Any]:
    """The dtypes that an actor reads from the config, and whether the actor has the shim."""
    import precision_shim

    put_in_place(pytest.MonkeyPatch())
    mixed = config.trainer.ref.fsdp_config.mixed_precision
    seams = precision_shim.status().frameworks["skyrl"].seams
    return {
        "rollout": engine_dtype(config),
        "reference": mixed and mixed.param_dtype,
        "wrapped": any(one.state == "wrapped" for one in seams),
    }


class Entry:
    """Replaces ``skyrl_entrypoint``, and stores the reference to the actor's answer."""

    answer: Any = None

    @classmethod
    def remote(cls, config: Any) -> Any:
        """Start the actor's task."""
        cls.answer = read_back.remote(config)
        return cls.answer


def run(policy: str, rollout: str, setting: str) -> dict[str, Any]:
    """Run one job; returns the driver's warnings and the dtypes that the actor reads."""
    words = on_fsdp(policy, *LIKE_A_CPU, f"{KEY}={rollout}")
    precision_shim.uninstall()
    precision_shim.install(frameworks=["skyrl"], settings={"rollout": setting}, export=False)
    sys.argv = ["main_base", *words]
    with ours() as told:
        main_base.main()
    main_base.initialize_ray = lambda config: None  # one cluster for all jobs
    found: dict[str, Any] = ray.get(Entry.answer)
    return {**found, "told": told}


def main() -> None:
    """Print the results by policy, rollout and setting."""
    own = ray.init

    def init(**options: Any) -> Any:
        folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
        where = {"address": "local", "num_cpus": 2, "include_dashboard": False, "_temp_dir": folder}
        options.setdefault("runtime_env", {})["py_executable"] = os.environ[WORKER_PYTHON]
        with unwatched():
            return own(**{**options, **where, "log_to_driver": False})

    ray.init = init
    main_base.skyrl_entrypoint = Entry
    found = {
        f"{policy} {rollout} {setting}": run(policy, rollout, setting)
        for setting in ("tell", "follow")
        for policy, rollout in PAIRS[:3]
    }
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main()
