"""Runs NeMo-RL's driver for some pairs of dtypes, up to the Ray actor that starts an engine.

Arguments: NeMo-RL's checkout, a folder with a model, an empty folder.
"""

from __future__ import annotations

import json
import os
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import ray

import precision_shim
from tests.every_framework.both_sides import DTYPES, FOLLOW, PAIRS, watched
from tests.nemo_rl.test_both_sides import GRPO, KEY, read, set_up
from tests.processes import ray_cluster
from tests.processes.forks import WORKER_PYTHON


@ray.remote(num_cpus=1)
def read_back(config: dict[str, Any], model: str) -> dict[str, str]:
    """The dtype with which NeMo-RL's own worker starts vLLM.

    vLLM has no wheel for a CPU: stand-ins define the names that the worker imports from vLLM.
    """
    from nemo_rl.distributed import numa_utils
    from nemo_rl.models.generation.vllm import vllm_worker

    vllm, logger = types.ModuleType("vllm"), types.ModuleType("vllm.logger")
    vars(vllm).update(SamplingParams=None, logger=logger)
    vars(logger).update(init_logger=lambda name: None)
    sys.modules.update({"vllm": vllm, "vllm.logger": logger})
    vllm_worker._apply_vllm_patches = lambda *args, **more: None
    vllm_worker.log_gpu_memory_diagnostics = lambda *args, **more: None
    numa_utils.bind_to_gpu_numa = lambda gpu: False
    ray.get_gpu_ids = lambda: [0]
    given: dict[str, str] = {}

    class Worker(vllm_worker.VllmGenerationWorkerImpl):  # type: ignore[misc]
        def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
            given["dtype"] = llm_kwargs["dtype"]

    # Without enable_prefix_caching NeMo-RL's worker reads the GPU's properties.
    own = {**config["vllm_cfg"], "enable_prefix_caching": False}
    Worker({**config, "model_name": model, "vllm_cfg": own}, bundle_indices=[0])
    return given


def run(policy: str, rollout: str, setting: str, *folders: Path) -> dict[str, Any]:
    """Run one job; returns the driver's warnings and the dtype of the actor's vLLM."""
    checkout, model, empty = folders
    words = (f"policy.precision={DTYPES[policy]}", f"{KEY}={rollout}")
    config = read(checkout, GRPO, *words)
    precision_shim.uninstall()
    settings = FOLLOW if setting == "follow" else {}
    precision_shim.install(frameworks=["nemo-rl"], settings=settings, export=False)
    with pytest.MonkeyPatch.context() as patch:
        given, told = watched(lambda: set_up(config, patch, empty))
    found: dict[str, Any] = ray.get(read_back.remote(given, str(model)))
    return {**found, "told": told}


def main() -> None:
    """Print the results by policy, rollout and setting."""
    warnings.simplefilter("ignore")
    ray_cluster.start(2, runtime_env={"py_executable": os.environ[WORKER_PYTHON]})
    folders = [Path(one) for one in sys.argv[1:]]
    found = {
        f"{policy} {rollout} {setting}": run(policy, rollout, setting, *folders)
        for setting in ("tell", "follow")
        for policy, rollout in PAIRS
    }
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main()
