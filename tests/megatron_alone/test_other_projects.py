"""Packages of other projects that have the name of a trainer: the shim leaves them alone."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .test_alone import places


@pytest.mark.parametrize("name", ["roll", "slime", "miles"])
def test_another_projects_package_is_left_alone(
    name: str,
    shim: Callable[..., Any],
    one_process: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    info = tmp_path / f"{name}-7.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 7.5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for one in ("verl", "skyrl", "nemo_rl", "torchtitan"):
        monkeypatch.delitem(sys.modules, one, raising=False)
    before = places()
    shim(export=False)  # strict mode has guards of its own where an optimizer is built
    importlib.import_module(name)
    try:
        status = sys.modules["precision_shim"].status()
    finally:
        del sys.modules[name]
    assert status.frameworks[name].state == "absent"
    assert places() == before
    assert capfd.readouterr().err == ""
