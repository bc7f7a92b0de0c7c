"""SkyRL's own tests that need no GPU: the same with the shim on and off.

They come from its repository at the tag that is installed, since its packages carry no tests. Its
``conftest.py``, which starts a Ray cluster, is left out, and so is what needs one.
"""

from __future__ import annotations

import ast
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.version import Version

from ..rank_server import Ranks
from ..upstream_files import fetch
from .conftest import SKYRL
from .support import python_path

pytestmark = pytest.mark.slow
URL = "https://github.com/NovaSky-AI/SkyRL"
COERCION = (
    # The pull request's end-to-end class, before its tests were narrowed for the merge.
    "b580133089a7d80818bcae31dd5fe8cfef6c83d2",
    "tests/backends/skyrl_train/distributed/test_optimizer_dtype_coercion.py",
    "TestInitMegatronOptimConfigDtypeCoercion",
)
TAG = f"refs/tags/skyrl-v{SKYRL}"
BEFORE = {Version("0.4.0"): "a9564572eb8e91076be43c1bd5e4615e3de17265"}
"""A commit before a release, for mirrors that are older than its tag. A few of its tests then ask
for what the release no longer has: they fail with the shim and without."""

_BACKEND = "tests/backends/skyrl_train"
FILES = (
    f"{_BACKEND}/distributed/test_moe_config.py",
    f"{_BACKEND}/distributed/test_optimizer_dtype_coercion.py",
    f"{_BACKEND}/distributed/test_worker_dispatch.py",
    f"{_BACKEND}/mtp/test_grad_clip.py",
    f"{_BACKEND}/weight_sync/test_weight_extractor_utils.py",
    f"{_BACKEND}/workers",
    "tests/train/test_config.py",
    "tests/train/test_trainer_utils.py",
)
"""What is about the workers, their optimizers and configs; not all are in every version."""

CONFTEST = """
import json, os, pathlib
import warnings
warnings.simplefilter("ignore")
from precision_shim.testing.transformer_engine import stand_in_transformer_engine
stand_in = stand_in_transformer_engine("2.11.0")
stand_in.__enter__()
import precision_shim
if os.environ["SHIM_IS_ON"] == "1":
    precision_shim.install()

outcomes = {}


def pytest_configure(config):
    for name in ("megatron", "vllm", "integrations"):
        config.addinivalue_line("markers", name)


def pytest_runtest_logreport(report):
    if report.outcome != "passed" or report.when == "call":
        outcomes.setdefault(report.nodeid, f"{report.outcome} {report.when}")


def pytest_collectreport(report):
    if report.outcome != "passed":
        outcomes.setdefault(report.nodeid, f"{report.outcome} collect")


def pytest_sessionfinish(session):
    told = precision_shim.status().frameworks.get("skyrl")
    wrapped = [one.target for one in told.seams if one.state == "wrapped"] if told else []
    found = {"outcomes": outcomes, "wrapped": wrapped}
    pathlib.Path(os.environ["OUTCOMES"]).write_text(json.dumps(found))
"""


@pytest.fixture(scope="session")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Get a folder of SkyRL's repository as it is at the first commit that can be fetched."""

    def get(*commits: str) -> Path:
        return fetch(tmp_path_factory.mktemp("skyrl"), URL, commits, "tests")

    return get


def run(ranks: Ranks, folder: Path, files: tuple[str, ...], on: bool) -> tuple[dict[str, str], str]:
    """Run test modules in a folder; returns what came of each test, and the output."""
    found = folder / f"outcomes-{on}.json"
    for conftest in folder.rglob("conftest.py"):
        conftest.unlink()
    (folder / "conftest.py").write_text(CONFTEST)
    options = ["-q", "-W", "ignore", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir=."]
    options += ["--continue-on-collection-errors", "--timeout=120"]
    ranks(
        "tests",
        world=1,
        timeout=1500,
        arguments=[*options, *[one for one in files if (folder / one).exists()]],
        environment={
            **os.environ,
            "PYTHONPATH": python_path(folder),
            "RAY_ADDRESS": "local",
            "SHIM_IS_ON": str(int(on)),
            "OUTCOMES": str(found),
        },
        cwd=str(folder),
    )
    said = ranks.said[0][-6000:]
    assert found.exists(), said
    read = json.loads(found.read_text())
    assert bool(read["wrapped"]) is on, said
    counts = dict(Counter(one.split()[0] for one in read["outcomes"].values()))
    print(f"SkyRL {SKYRL}'s own tests, shim {'on' if on else 'off'}: {counts}")
    return read["outcomes"], said


def passed(outcomes: dict[str, str]) -> int:
    return sum(one == "passed call" for one in outcomes.values())


def test_coercion_end_to_end(ranks: Ranks, fetched: Callable[..., Path], tmp_path: Path) -> None:
    commit, path, name = COERCION
    whole = (fetched(commit) / path).read_text(encoding="utf-8")
    (theirs,) = [
        node
        for node in ast.parse(whole).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    text = f"import pytest\nimport torch\n\n\n{ast.get_source_segment(whole, theirs)}\n"
    (tmp_path / "test_theirs.py").write_text(text)
    outcomes, output = run(ranks, tmp_path, ("test_theirs.py",), on=True)
    assert (passed(outcomes), len(outcomes)) == (4, 4), output
    outcomes, output = run(ranks, tmp_path, ("test_theirs.py",), on=False)
    if Version("0.3") > SKYRL:
        assert passed(outcomes) <= 2, output
    else:
        assert (passed(outcomes), len(outcomes)) == (4, 4), output


@pytest.mark.timeout(3000)
def test_upstreams_own_tests_have_the_same_outcome(
    ranks: Ranks, fetched: Callable[..., Path]
) -> None:
    folder = fetched(TAG, *[one for version, one in BEFORE.items() if version == SKYRL])
    off, _ = run(ranks, folder, FILES, on=False)
    on, output = run(ranks, folder, FILES, on=True)
    assert on == off, output
    assert passed(off) >= 30
