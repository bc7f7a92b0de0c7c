"""SkyRL's own tests, with the shim on and off; they come from its repository."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.version import Version

from ..rank_server import Ranks
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
CONFIG, UTILITIES = "tests/train/test_config.py", "tests/train/util.py"

CONFTEST = """
import warnings
warnings.simplefilter("ignore")
from precision_shim.testing.transformer_engine import stand_in_transformer_engine
stand_in = stand_in_transformer_engine("2.11.0")
stand_in.__enter__()
import precision_shim
{install}
"""


@pytest.fixture(scope="session")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], str]:
    """Get one file of SkyRL's repository at one commit."""

    def get(commit: str, path: str) -> str:
        folder = tmp_path_factory.mktemp("skyrl")
        for command in (
            ["init", "--quiet"],
            ["remote", "add", "origin", URL],
            ["fetch", "--quiet", "--depth=1", "--filter=blob:none", "origin", commit],
            ["show", f"FETCH_HEAD:{path}"],
        ):
            done = subprocess.run(
                ["git", *command],
                cwd=folder,
                capture_output=True,
                text=True,
                check=False,
                timeout=600,
            )
            if done.returncode != 0:
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                pytest.skip(f"{URL} at {commit} cannot be fetched: {last}")
        return done.stdout

    return get


def run(ranks: Ranks, folder: Path, text: str, on: bool) -> tuple[set[str], set[str], str]:
    """Run a test module; returns what passed, what failed, and the output."""
    install = "precision_shim.install()" if on else ""
    (folder / "conftest.py").write_text(CONFTEST.format(install=install))
    (folder / "test_theirs.py").write_text(text)
    options = ["-q", "-rA", "-W", "ignore", "-p", "no:cacheprovider", "-c", os.devnull]
    environment = {**os.environ, "PYTHONPATH": python_path(), "RAY_ADDRESS": "local"}
    ranks(
        "tests",
        world=1,
        arguments=[*options, str(folder / "test_theirs.py")],
        environment=environment,
        cwd=str(folder),
    )
    said = ranks.said[0]
    found = {
        outcome: set(re.findall(rf"^{outcome} \S+?::(\S+)", said, re.MULTILINE))
        for outcome in ("PASSED", "FAILED", "ERROR")
    }
    bad = found["FAILED"] | found["ERROR"]
    on_or_off = "on" if on else "off"
    print(f"skyrl {SKYRL}, shim {on_or_off}: {len(found['PASSED'])} passed, {len(bad)} failed")
    return found["PASSED"], bad, said[-3000:]


def test_coercion_end_to_end(
    ranks: Ranks, fetched: Callable[[str, str], str], tmp_path: Path
) -> None:
    commit, path, name = COERCION
    whole = fetched(commit, path)
    (theirs,) = [
        node
        for node in ast.parse(whole).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    text = f"import pytest\nimport torch\n\n\n{ast.get_source_segment(whole, theirs)}\n"
    passed, failed, output = run(ranks, tmp_path, text, on=True)
    assert (len(passed), failed) == (4, set()), output
    passed, failed, output = run(ranks, tmp_path, text, on=False)
    if Version("0.3") > SKYRL:
        assert len(failed) >= 2, output
    else:
        assert (len(passed), failed) == (4, set()), output


def test_their_tests_of_the_config(
    ranks: Ranks, fetched: Callable[[str, str], str], tmp_path: Path
) -> None:
    """The config is what this adapter looks at most closely."""
    (tmp_path / "theirs_util.py").write_text(fetched(TAG, UTILITIES))
    text = fetched(TAG, CONFIG).replace("from tests.train.util", "from theirs_util")
    on, off = run(ranks, tmp_path, text, on=True), run(ranks, tmp_path, text, on=False)
    assert len(on[0]) >= 18, on[2]  # two of 0.2 want a YAML that its wheel lacks
    assert on[:2] == off[:2], on[2]
