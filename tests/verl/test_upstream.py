"""verl's own merged tests of init_megatron_optim_config, with the shim on.

They come from verl's repository at the tag that merged them (the wheel carries no tests) and run
on every version of verl in ``as-configured`` mode. One is expected to fail: it hands the nonsense
dtype ``"sentinel-override"`` through, which coercion must refuse.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from .conftest import VERL

SOURCE = ("https://github.com/verl-project/verl", "v0.9.0")
MEMBER = "tests/utils/megatron/test_optimizer.py"
DEVIATION = "test_override_optimizer_config_overrides_branch_defaults"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        Version("0.7") > VERL, reason="written for the function of verl 0.7.1 and later"
    ),
]


@pytest.fixture(scope="session")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("upstream")
    url, tag = SOURCE
    clone = ["git", "clone", "--quiet", "--depth=1", f"--branch={tag}", url, str(folder / "verl")]
    done = subprocess.run(clone, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        pytest.skip(f"{url} at {tag} cannot be fetched: {last}")
    tests = folder / "tests"
    tests.mkdir()
    shutil.copy(folder / "verl" / MEMBER, tests)
    shutil.rmtree(folder / "verl")
    return tests


@pytest.mark.parametrize("on", [True, False], ids=["shim on", "shim off"])
def test_upstreams_own_tests(upstream: Path, on: bool) -> None:
    install = "precision_shim.install(settings={'optimizer_states': 'as-configured'})"
    (upstream / "conftest.py").write_text(f"import precision_shim\n{install if on else ''}\n")
    options = ["-q", "-rA", "-W", "ignore", "-p", "no:cacheprovider", "-c", os.devnull]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(upstream / "test_optimizer.py")],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        cwd=upstream,
    )
    failed = set(re.findall(r"^FAILED \S+::(\w+)", done.stdout, re.MULTILINE))
    passed = set(re.findall(r"^PASSED \S+::(\w+)", done.stdout, re.MULTILINE))
    print(f"verl {VERL}, shim {'on' if on else 'off'}: {len(passed)} passed, {len(failed)} failed")
    assert len(passed | failed) == 11, done.stdout[-3000:]
    if on:
        assert failed == {DEVIATION}, done.stdout[-3000:]
        assert "DtypeError" in done.stdout
    elif Version("0.9") > VERL:
        assert len(failed) > 5, "without the shim this version lacks what they test"
    else:
        assert not failed, done.stdout[-3000:]
