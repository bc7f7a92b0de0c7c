"""torchtitan's own tests that need no GPU, with the shim on and off: the same outcome.

Those of its RL package come with its wheel; the others from its repository. What wants vLLM, a GPU
or the network fails in both runs, and is the same in that. Tests that start processes are left out:
those processes read neither this file's ``conftest.py`` nor the shim's start-up file.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ..upstream_files import fetch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2000)]
URL = "https://github.com/pytorch/torchtitan"
COMMIT = "1fdf90d3f9b756ef709ce262bc839f1dab679b5e"
"""The version 0.3.0rc1; it has no tag."""

UNIT = (
    "activation_checkpoint",
    "checkpoint",
    "compile_moe",
    "config_manager",
    "configurable",
    "distributed_utils",
    "expert_parallel",
    "fused_qkv",
    "gpt_oss_moe",
    "inference_moe",
    "invalid_loss",
    "linear",
    "lora",
    "loss",
    "lr_scheduler",
    "module",
    "moe",
    "no_new_cli_options",
    "optimizer_param_groups",
    "override",
    "parallel_dims",
    "set_determinism",
    "state_dict_keys",
    "train_spec",
    "trainer",
    "weight_tying",
)
"""What is about the trainers, their configs and what the shim enters."""

CONFTEST = """
import json, os, pathlib, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, os.environ["ROOT"])
from tests.torchtitan import cpu
cpu.answer_for_gpus()
import precision_shim

outcomes = {}

if os.environ["SHIM_IS_ON"] == "1":
    precision_shim.install(settings={"log": "quiet"})


def pytest_collection_modifyitems(items):
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    items[:] = [
        one for one in items if not issubclass(one.cls or object, MultiProcessTestCase)
    ]


def pytest_runtest_logreport(report):
    if report.outcome != "passed" or report.when == "call":
        outcomes.setdefault(report.nodeid, f"{report.outcome} {report.when}")


def pytest_collectreport(report):
    if report.outcome != "passed":
        outcomes.setdefault(report.nodeid, f"{report.outcome} collect")


def pytest_sessionfinish(session):
    frameworks = precision_shim.status().frameworks
    seams = frameworks["torchtitan"].seams if "torchtitan" in frameworks else []
    wrapped = [one.target for one in seams if one.state == "wrapped"]
    found = {"outcomes": outcomes, "wrapped": wrapped}
    pathlib.Path(os.environ["OUTCOMES"]).write_text(json.dumps(found))
"""


def run(folder: Path, on: bool) -> dict[str, Any]:
    """Run the tests in a folder; returns their outcomes, and the seams that were in force."""
    (folder / "conftest.py").write_text(CONFTEST)
    outcomes = folder.with_name(f"{folder.name}-{on}.json")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PRECISION_SHIM")}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider"),
            # Some want vLLM when they are imported.
            *("--continue-on-collection-errors", "--timeout=120", "-c", os.devnull),
            *("--rootdir", str(folder), str(folder)),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={
            **environment,
            "ROOT": str(Path(__file__).parents[2]),
            "SHIM_IS_ON": str(int(on)),
            "OUTCOMES": str(outcomes),
            "CUDA_VISIBLE_DEVICES": "",
        },
        timeout=900,
    )
    assert outcomes.exists(), (done.stdout + done.stderr)[-6000:]
    found: dict[str, Any] = json.loads(outcomes.read_text())
    counts = Counter(outcome.split()[0] for outcome in found["outcomes"].values())
    print(f"torchtitan's own in {folder.name}, shim {'on' if on else 'off'}: {dict(counts)}")
    return found


def hold(folder: Path) -> None:
    """The same outcome of each test with the shim on and off, and the shim was there."""
    off, on = run(folder, on=False), run(folder, on=True)
    assert on["outcomes"] == off["outcomes"]
    outcomes = list(off["outcomes"].values())
    assert outcomes.count("passed call") > len(outcomes) / 2
    assert on["wrapped"]
    assert not off["wrapped"]


def test_their_tests_of_the_rl_package(tmp_path: Path) -> None:
    (place,) = importlib.util.find_spec("torchtitan").submodule_search_locations
    folder = tmp_path / "rl"
    folder.mkdir()
    for file in Path(place, "experiments", "rl", "tests").glob("test_*.py"):
        (folder / file.name).write_text(file.read_text())
    hold(folder)


def test_their_unit_tests(tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    folder.mkdir()
    fetch(folder, URL, (COMMIT,), "tests/unit_tests")
    chosen = tmp_path / "unit_tests"
    chosen.mkdir()
    for name in UNIT:
        file = folder / "tests" / "unit_tests" / f"test_{name}.py"
        (chosen / file.name).write_text(file.read_text())
    hold(chosen)
