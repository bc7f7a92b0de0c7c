"""NeMo-RL's own unit tests without a GPU or a cluster: the same with the shim on and off.

They come from its repository at the tag that is installed, since its package carries no tests. Its
``conftest.py``, which starts a Ray cluster for every test, is left out; a test that asks for what
stands there errors in both runs, and is the same in that.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from ..rank_server import Ranks
from .support import NEMO_RL

pytestmark = pytest.mark.slow
URL = "https://github.com/NVIDIA-NeMo/RL"
FILES = (
    "models/automodel",
    "models/dtensor",
    "models/policy/test_utils.py",
    "models/value/test_dtensor_value_worker.py",
    "utils/test_native_checkpoint.py",
    "utils/test_automodel_checkpoint.py",
)
"""What is about the workers and what the shim enters; not all are in every version."""

CONFTEST = """
import json, os, pathlib
import pytest

outcomes = {}

if os.environ["SHIM_IS_ON"] == "1":
    import precision_shim
    precision_shim.install()


def pytest_configure(config):
    for name in ("automodel", "mcore", "vllm", "sglang", "hf_gated", "run_first", "nemo_gym"):
        config.addinivalue_line("markers", name)


def pytest_runtest_logreport(report):
    if report.outcome != "passed" or report.when == "call":
        outcomes.setdefault(report.nodeid, f"{report.outcome} {report.when}")


def pytest_collectreport(report):
    if report.outcome != "passed":
        outcomes.setdefault(report.nodeid, f"{report.outcome} collect")


def pytest_sessionfinish(session):
    seams = []
    if os.environ["SHIM_IS_ON"] == "1":
        seams = precision_shim.status().frameworks["nemo-rl"].seams
    wrapped = [one.target for one in seams if one.state == "wrapped"]
    found = {"outcomes": outcomes, "wrapped": wrapped}
    pathlib.Path(os.environ["OUTCOMES"]).write_text(json.dumps(found))
"""


@pytest.fixture(scope="session")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("upstream") / "RL"
    tag = f"v{NEMO_RL}"
    clone = ["git", "clone", "--quiet", "--depth=1", f"--branch={tag}", URL, str(folder)]
    done = subprocess.run(clone, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        pytest.skip(f"{URL} at {tag} cannot be fetched: {last}")
    (folder / "tests/unit/conftest.py").write_text(CONFTEST)
    return folder


def run(upstream: Path, ranks: Ranks, on: bool) -> dict[str, dict[str, str]]:
    found = upstream.parent / f"outcomes-{on}.json"
    options = ["-q", "-W", "ignore", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir=."]
    files = [f"tests/unit/{one}" for one in FILES if (upstream / "tests/unit" / one).exists()]
    ranks(
        "tests",
        world=1,
        timeout=1500,
        arguments=[*options, "--timeout=120", *files],
        cwd=str(upstream),
        environment={
            **os.environ,
            "PYTHONPATH": str(upstream),
            "SHIM_IS_ON": str(int(on)),
            "OUTCOMES": str(found),
            "CUDA_VISIBLE_DEVICES": "",
        },
    )
    assert found.exists(), ranks.said[0][-6000:]
    return json.loads(found.read_text())


@pytest.mark.timeout(3000)
def test_upstreams_own_tests_have_the_same_outcome(upstream: Path, ranks: Ranks) -> None:
    off, on = run(upstream, ranks, False), run(upstream, ranks, True)
    counts = Counter(outcome.split()[0] for outcome in off["outcomes"].values())
    print("NeMo-RL's own tests:", dict(counts))
    assert on["outcomes"] == off["outcomes"]
    assert counts["passed"] >= 15  # 0.4.0 has the fewest: 18
    assert on["wrapped"]
    assert not off["wrapped"]
