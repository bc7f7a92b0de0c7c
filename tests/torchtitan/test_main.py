"""The shim works on an untested version: a commit of torchtitan's main branch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from ..upstreams_own import fetch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2000)]
URL = "https://github.com/pytorch/torchtitan"
COMMIT = "b5bcd76c66d0acb1a08b176d9639425bc55e0b2a"
ROOT = Path(__file__).parents[2]
FILES = ("test_rl.py", "test_pretraining.py", "test_checkpoints.py", "test_audit.py")


@pytest.fixture(scope="module")
def main(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the package ``torchtitan`` of ``COMMIT``."""
    return fetch(tmp_path_factory.mktemp("main"), URL, (COMMIT,), "torchtitan")


def python(*arguments: str, environment: Mapping[str, str]) -> str:
    """Run Python; returns stdout, and fails if the exit status is not 0."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def test_the_doctor_finds_every_symbol(main: Path) -> None:
    """Every symbol that the seams use in 0.3.0 exists on the main branch."""
    found = json.loads(
        python(
            *("-m", "precision_shim", "doctor", "--json"),
            *("--against", str(main), "--framework", "torchtitan"),
            environment=os.environ,
        )
    )
    assert found["ok"]
    assert not found["tested"]
    assert not found["lost"]


def test_both_trainers_as_in_the_tested_version(main: Path) -> None:
    """The main branch passes these tests, although ``train_step`` asserts a finite grad norm."""
    if find_spec("grain") is None:
        pytest.skip("torchtitan's main branch needs grain")
    assert "torch._assert_async" in (main / "torchtitan" / "trainer.py").read_text()
    path = os.pathsep.join(filter(None, (str(main), os.environ.get("PYTHONPATH"))))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PRECISION_SHIM")}
    environment["PYTHONPATH"] = path
    told = "from importlib.util import find_spec; print(find_spec('torchtitan').origin)"
    assert python("-c", told, environment=environment).startswith(str(main))
    python(
        *("-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--timeout=300"),
        *(str(Path(__file__).with_name(name)) for name in FILES),
        environment=environment,
    )
