"""NeMo-RL as a checkout on ``PYTHONPATH``, which is how its own launcher runs it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from ..checkouts import Told, as_checkout, as_installed


@pytest.fixture(scope="module")
def installed() -> Told:
    """What the doctor says of the installed NeMo-RL."""
    return as_installed("nemo-rl")


def test_a_checkout_is_the_version_that_it_states(installed: Told, tmp_path: Path) -> None:
    found = as_checkout("nemo-rl", tmp_path)
    assert found.version == installed.version.partition("+")[0]
    assert found.tested is True
    assert found.reason == installed.reason
    assert found.problems == installed.problems
    assert found.seams == installed.seams


def test_what_states_no_version_is_the_recorded_one_that_it_equals(
    installed: Told, tmp_path: Path
) -> None:
    def say_nothing(root: Path) -> None:
        (root / "nemo_rl/package_info.py").unlink()

    found = as_checkout("nemo-rl", tmp_path, say_nothing)
    assert found.version == "unknown"
    assert f"all as in {installed.version.partition('+')[0]}" in found.reason
    assert found.seams == installed.seams
    assert len(found.problems) == len(installed.problems)


def test_what_is_like_no_recorded_version_lacks_nothing(installed: Told, tmp_path: Path) -> None:
    """A changed line in a symbol: nobody can say which version it is."""

    def change(root: Path) -> None:
        (root / "nemo_rl/package_info.py").unlink()
        worker = next((root / "nemo_rl/models/policy").rglob("dtensor_policy_worker.py"))
        text = worker.read_text("utf-8")
        head, line, rest = text.partition("        self.cfg = config\n")
        assert line
        worker.write_text(f"{head}{line}        self.another_line = True\n{rest}", "utf-8")

    found = as_checkout("nemo-rl", tmp_path, change)
    assert found.version == "unknown"
    assert "all as in" not in found.reason
    assert found.seams == installed.seams
    assert len(found.problems) == len(installed.problems)


def test_a_checkout_before_another_that_is_installed(tmp_path: Path) -> None:
    """The metadata on the path is not that of what is imported."""
    place = next(Path(one, "nemo_rl") for one in sys.path if Path(one, "nemo_rl").is_dir())
    shutil.copytree(place, tmp_path / "nemo_rl")
    stated = tmp_path / "nemo_rl/package_info.py"
    lines = stated.read_text("utf-8").splitlines()
    changed = ["MINOR = 99" if one.startswith("MINOR") else one for one in lines]
    stated.write_text("\n".join(changed), "utf-8")
    found = Told("nemo-rl", [str(tmp_path), *(one for one in sys.path if one)])
    assert found.version.split(".")[1] == "99"
    assert "not among the tested versions" in found.reason
