"""Whether a package's files equal those of the distribution's wheel."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest

from precision_shim_adapters.released import are_released

TEXT = "dtype: bfloat16\n"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with one recorded file; its other file has no hash, as in a source checkout."""
    package, about = tmp_path / "tiny", tmp_path / "tiny-1.0.dist-info"
    package.mkdir()
    about.mkdir()
    (package / "rollout.yaml").write_text(TEXT)
    (package / "bare.yaml").write_text(TEXT)
    digest = base64.urlsafe_b64encode(hashlib.sha256(TEXT.encode()).digest()).decode().rstrip("=")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
    (about / "RECORD").write_text(
        f"tiny/rollout.yaml,sha256={digest},{len(TEXT)}\ntiny/bare.yaml,,\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return package


def test_only_unchanged_files_of_the_wheel_are(installed: Path, tmp_path: Path) -> None:
    shipped = installed / "rollout.yaml"
    assert are_released("tiny", [shipped])
    assert not are_released("tiny", [shipped, installed / "bare.yaml"])
    copy = tmp_path / "rollout.yaml"
    copy.write_text(TEXT)
    assert not are_released("tiny", [copy])
    assert not are_released("no-such-distribution", [shipped])
    assert not are_released("tiny", [installed / "gone.yaml"])
    shipped.write_text(TEXT.replace("bfloat16", "float32"))
    assert not are_released("tiny", [shipped])
