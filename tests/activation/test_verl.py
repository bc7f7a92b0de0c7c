"""Tests of real verl in the processes that run it: torchrun, Ray workers, ``python -S``.

Each test starts fresh processes; ``tests/verl`` tests what the shim does within verl.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

if any(importlib.util.find_spec(name) is None for name in ("verl", "megatron", "torch")):
    pytest.skip("needs verl and megatron-core", allow_module_level=True)

CONFIG = "verl.utils.megatron.optimizer:init_megatron_optim_config"
REPORT = """
def report():
    import precision_shim
    import verl.utils.megatron.optimizer
    seams = precision_shim.status().frameworks["verl"].seams
    return {f"{seam.target} {seam.feature}": seam.state for seam in seams}
"""


def environment(**variables):
    inherited = {
        k: v for k, v in os.environ.items() if not k.startswith(("PRECISION_SHIM", "RAY_"))
    }
    ours = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    quiet = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    return {**inherited, **ours, **quiet, **variables}


def run(*command, **variables):
    for _ in range(3):  # Ray allows a node only 30 seconds to start, too few on a busy machine
        done = subprocess.run(
            command,
            env=environment(**variables),
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if "timed out during startup" not in done.stderr:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def told(done):
    return json.loads(done.stdout.splitlines()[-1])


def test_without_start_up_files_by_verls_own_plug_in():
    """``python -S`` reads no start-up file, but verl imports ``precision_shim.autoinstall``."""
    code = REPORT + "import json; print(json.dumps(report()))"
    path = os.pathsep.join(entry for entry in sys.path if entry)
    variables = {"PYTHONPATH": path, "PRECISION_SHIM_FEATURES": "dtype-coercion"}
    plug_in = {"VERL_USE_EXTERNAL_MODULES": "precision_shim.autoinstall"}
    states = told(run(sys.executable, "-S", "-c", code, **variables, **plug_in))
    assert states[f"{CONFIG} dtype-coercion"] == "wrapped"
    assert states[f"{CONFIG} bf16-dispatch"] == "off"


WORKER = (
    REPORT
    + """
import json, sys
import verl.utils.megatron_utils
with open(sys.argv[1], "w") as out:
    json.dump(report(), out)
"""
)


def test_torchrun_started_by_precision_shim_run(tmp_path):
    """One rank: torchrun starts all alike."""
    program, report = tmp_path / "train.py", tmp_path / "report.json"
    program.write_text(WORKER)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    run(
        *(sys.executable, "-m", "precision_shim", "run", "--"),
        *(sys.executable, *torchrun, str(program), str(report)),
    )
    states = json.loads(report.read_text())
    for seam in (
        f"{CONFIG} dtype-coercion",
        f"{CONFIG} bf16-dispatch",
        "verl.utils.megatron_utils:get_model grad-bucket-alignment",
    ):
        assert states[seam] in ("wrapped", "native")
