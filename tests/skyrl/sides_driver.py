"""The driver of SkyRL's jobs, up to the Ray actor that gets the config: nine pairs, by ``main``.

SkyRL's users put an entry point of their own in the place of its ``skyrl_entrypoint``; this one
returns what the engines would be started with.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from typing import Any

import pytest
import ray
from skyrl.train.entrypoints import main_base

import precision_shim
from precision_shim.errors import PrecisionShimWarning
from tests.skyrl.test_both_sides import DTYPES, KEY, on_fsdp
from tests.skyrl.vllm_names import engine_dtype, put_in_place

LIKE_A_CPU = ("trainer.flash_attn=false", "trainer.logger=console")


@ray.remote(num_cpus=1)
def read_back(config: Any) -> dict[str, Any]:
    """What the actor's process makes of the config."""
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
    """Stands where ``skyrl_entrypoint`` does, and keeps what the actor answers."""

    answer: Any = None

    @classmethod
    def remote(cls, config: Any) -> Any:
        """Start the actor's task."""
        cls.answer = read_back.remote(config)
        return cls.answer


def run(policy: str, rollout: str | None, setting: str) -> dict[str, Any]:
    """One job: what the driver said, and what the actor was given."""
    words = on_fsdp(policy, *LIKE_A_CPU, *([f"{KEY}={rollout}"] if rollout else []))
    precision_shim.uninstall()
    precision_shim.install(frameworks=["skyrl"], settings={"rollout": setting}, export=False)
    sys.argv = ["main_base", *words]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", PrecisionShimWarning)
        main_base.main()
    main_base.initialize_ray = lambda config: None  # one cluster for all jobs
    found: dict[str, Any] = ray.get(Entry.answer)
    found["told"] = [str(one.message) for one in told if one.category is PrecisionShimWarning]
    return found


def main() -> None:
    """Print what was found, by policy, rollout and setting."""
    own = ray.init

    def init(**options: Any) -> Any:
        folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
        where = {"address": "local", "num_cpus": 2, "include_dashboard": False, "_temp_dir": folder}
        return own(**{**options, **where, "log_to_driver": False})

    ray.init = init
    main_base.skyrl_entrypoint = Entry
    found = {
        f"{policy} {rollout} {setting}": run(policy, rollout, setting)
        for setting in ("tell", "follow")
        for policy in DTYPES
        for rollout in (*DTYPES, None)
    }
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main()
