"""Packages of other projects that share a trainer's name: the shim does not patch them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import precision_shim
from precision_shim.process.registry import entries, load
from precision_shim.process.session import current_settings
from precision_shim_adapters.megatron import adapter
from precision_shim_tools.predicted import predict_seams

from ..every_framework.taken_out import namespaces
from .training import Trainer, fp16


@pytest.mark.parametrize(
    ("name", "framework", "strict"),
    [
        ("roll", "roll", False),
        ("slime", "slime", True),
        ("miles", "miles", False),
        ("swift", "ms-swift", True),
    ],
)
def test_another_projects_package_is_left_alone(
    name: str,
    framework: str,
    strict: bool,
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
    before = namespaces(adapter.SEAMS)
    shim(strict=strict, export=False)
    importlib.import_module(name)
    try:
        status = precision_shim.status()
        predicted = predict_seams(load(entries()[framework]), current_settings())
    finally:
        del sys.modules[name]
    assert {seam.state for seam in predicted} <= {"absent"}
    assert status.frameworks[framework].state == "absent"
    if not strict:  # strict mode adds guards where optimizers are built; they pass the call on
        assert namespaces(adapter.SEAMS) == before
    assert [float(one.scale) for one in Trainer.of(fp16(scale=None)).scalers] == [2.0**32]
    assert precision_shim.status().decisions == ()
    assert capfd.readouterr().err == ""
