"""torchtitan's own tests that need no GPU, with the shim on and off: the same outcome.

Those of its RL package come with its wheel; the others from its repository.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
URL = "https://github.com/pytorch/torchtitan"
COMMIT = "1fdf90d3f9b756ef709ce262bc839f1dab679b5e"
"""The version 0.3.0rc1; it has no tag."""

UNIT = (
    "test_activation_checkpoint",
    "test_checkpoint",
    "test_config_manager",
    "test_configurable",
    "test_invalid_loss",
    "test_loss",
    "test_lr_scheduler",
    "test_module",
    "test_no_new_cli_options",
    "test_optimizer_param_groups",
    "test_override",
    "test_parallel_dims",
    "test_trainer",
)

CONFTEST = """
import sys
import warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {root!r})
from tests.torchtitan import cpu
cpu.answer_for_gpus()
import precision_shim
{install}
"""


def run(folder: Path, on: bool) -> tuple[dict[str, set[str]], str]:
    """Run the tests in a folder; returns them by outcome, and the output."""
    root = str(Path(__file__).parents[2])
    install = "precision_shim.install(settings={'log': 'quiet'})" if on else ""
    (folder / "conftest.py").write_text(CONFTEST.format(root=root, install=install))
    options = ["-q", "-rA", "-W", "ignore", "-p", "no:cacheprovider", "-c", os.devnull]
    # Some want vLLM, or a GPU's kernels, when they are imported.
    options.append("--continue-on-collection-errors")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PRECISION_SHIM")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--rootdir", str(folder), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=environment,
        timeout=900,
    )
    found = {
        outcome: set(re.findall(rf"^{outcome} (\S+)", done.stdout, re.MULTILINE))
        for outcome in ("PASSED", "FAILED", "ERROR")
    }
    counts = ", ".join(f"{len(one)} {outcome.lower()}" for outcome, one in found.items())
    print(f"torchtitan's own in {folder.name}, shim {'on' if on else 'off'}: {counts}")
    return found, done.stdout[-3000:]


def hold(folder: Path, least: int) -> None:
    """The same outcome with the shim on and off, and enough of it."""
    off, _ = run(folder, on=False)
    on, output = run(folder, on=True)
    assert len(off["PASSED"]) >= least, output
    assert on == off, output


def test_their_tests_of_the_rl_package(tmp_path: Path) -> None:
    import importlib.util

    (place,) = importlib.util.find_spec("torchtitan").submodule_search_locations
    folder = tmp_path / "rl"
    folder.mkdir()
    for file in Path(place, "experiments", "rl", "tests").glob("test_*.py"):
        (folder / file.name).write_text(file.read_text())
    hold(folder, 100)


@pytest.fixture(scope="session")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Get one file of torchtitan's repository."""
    folder = tmp_path_factory.mktemp("torchtitan")
    ready = False

    def get(path: str) -> str:
        nonlocal ready
        commands = [["show", f"{COMMIT}:{path}"]]
        if not ready:
            commands[:0] = [
                ["init", "--quiet"],
                ["remote", "add", "origin", URL],
                ["fetch", "--quiet", "--depth=1", "--filter=blob:none", "origin", COMMIT],
            ]
        for command in commands:
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
                pytest.skip(f"{URL} at {COMMIT} cannot be fetched: {last}")
        ready = True
        return done.stdout

    return get


def test_their_unit_tests(fetched: Callable[[str], str], tmp_path: Path) -> None:
    folder = tmp_path / "unit_tests"
    folder.mkdir()
    for name in UNIT:
        (folder / f"{name}.py").write_text(fetched(f"tests/unit_tests/{name}.py"))
    hold(folder, 100)
