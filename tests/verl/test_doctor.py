"""The report of ``precision-shim doctor`` on TransformerEngine, with verl and Megatron.

The doctor reads TransformerEngine's metadata and imports TransformerEngine. So the fake
installations of these tests have metadata and an importable package only.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.version import Version

from .conftest import VERL

pytestmark = [
    pytest.mark.skipif(
        find_spec("transformer_engine") is not None, reason="a TransformerEngine is installed"
    ),
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed"),
    pytest.mark.skipif(
        Version("0.7") > VERL, reason="verl 0.6's environment is for the untested version"
    ),
]

MOMENTS = "exp_avg_dtype=bf16 or exp_avg_sq_dtype=bf16 ends in DtypeError"
OPTIMIZER = "use_precision_aware_optimizer=true ends in UnsupportedPrecisionError"
USED = """
import precision_shim
precision_shim.install()
import verl
from megatron.core.optimizer import OptimizerConfig
OptimizerConfig(
    bf16=True, use_precision_aware_optimizer=True, use_distributed_optimizer=True,
    exp_avg_dtype="bf16",
)
"""


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PRECISION_SHIM")}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**clean, **variables},
    )


def doctor(**variables: str) -> tuple[int, str, str]:
    """The doctor's exit status, its text unfolded, and the last heading of the text."""
    done = python("-m", "precision_shim", "doctor", **variables)
    last = [line for line in done.stdout.splitlines() if line[:1].strip()][-1]
    return done.returncode, " ".join(done.stdout.split()), last


def installed(folder: Path, version: str) -> str:
    """A ``PYTHONPATH`` with metadata of a TransformerEngine version, and an importable package."""
    metadata = folder / f"transformer_engine-{version}.dist-info" / "METADATA"
    module = folder / "transformer_engine" / "pytorch" / "__init__.py"
    for file in (metadata, module, module.parents[1] / "__init__.py"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    metadata.write_text(f"Metadata-Version: 2.1\nName: transformer_engine\nVersion: {version}\n")
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def test_without_transformer_engine_it_says_how_the_job_ends() -> None:
    status, text, last = doctor()
    assert status == 0
    assert (
        f"TransformerEngine is not installed: optimizer states stay fp32, and {OPTIMIZER}" in text
    )
    assert "Install TransformerEngine 2.3 or newer" in text
    assert last == "no problems, but the limits above"
    ended = python("-c", USED).stderr.strip().splitlines()[-1]
    assert ended.startswith("precision_shim.errors.UnsupportedPrecisionError: ")
    assert "TransformerEngine is not installed" in ended


@pytest.mark.slow
def test_a_transformer_engine_that_is_too_old_is_named(tmp_path: Path) -> None:
    status, text, last = doctor(PYTHONPATH=installed(tmp_path, "2.2.0"))
    assert (status, last) == (0, "no problems, but the limits above")
    assert "TransformerEngine 2.2.0 takes no bf16 moments: optimizer states stay fp32" in text
    assert MOMENTS in text
    assert OPTIMIZER not in text


def test_states_that_a_variable_asks_for_and_that_cannot_be_had_are_a_problem() -> None:
    status, text, last = doctor(PRECISION_SHIM_OPTIMIZER_STATES="follow-model")
    assert (status, last) == (1, "problems")
    assert OPTIMIZER in text.partition(" problems ")[2]
