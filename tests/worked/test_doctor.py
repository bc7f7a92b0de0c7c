"""The doctor's report on a third party's adapter, whose own symbols are not recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from precision_shim.process import registry as _registry
from precision_shim.process import settings as _settings
from precision_shim.process import versions as _versions
from precision_shim.process.framework import Adapter
from precision_shim.upstream import symbols as _symbols
from precision_shim.upstream.foresight import foresee

pytest.importorskip("megatron.core", reason="Megatron-core is not installed in this environment")

OWN = "megatron.core.optimizer.clip_grads:clip_grad_by_total_norm_fp32"
"""A symbol of a recorded distribution that no adapter of ours patches."""

ADAPTER = f"""
import tinytron_shim
from precision_shim.adapting import collect, seam


@seam("{OWN}", "audit", why="a test")
def look(call):
    return call.proceed()


ADAPTER = tinytron_shim.ADAPTER.replace(
    framework="thirdtron",
    distribution="thirdtron",
    seams=(*tinytron_shim.ADAPTER.seams, *collect(look)),
)
"""


@pytest.fixture
def thirdtron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Adapter:
    """A framework whose adapter is found by its entry point."""
    info = tmp_path / "thirdtron-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thirdtron\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[precision_shim.adapters]\nthirdtron = thirdtron_shim:ADAPTER\n"
    )
    (tmp_path / "thirdtron_shim.py").write_text(ADAPTER)
    (tmp_path / "thirdtron").mkdir()
    (tmp_path / "thirdtron/__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    return _registry.entries()["thirdtron"]


def test_symbols_that_nobody_recorded_are_not_new(thirdtron: Adapter) -> None:
    found, problems = foresee(thirdtron, _settings.resolve(environ={}), _versions.version_of)
    assert problems == []
    assert OWN in [seam.target for seam in found.seams]
    assert found.reason == ""


def test_a_recorded_symbol_that_differs_is_said(
    thirdtron: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = "megatron.core.optimizer.optimizer:MixedPrecisionOptimizer.step"
    own = _symbols.digest
    monkeypatch.setattr(
        _symbols, "digest", lambda target: "another" if target == changed else own(target)
    )
    found, _ = foresee(thirdtron, _settings.resolve(environ={}), _versions.version_of)
    assert "is not what was recorded" in found.reason
    assert "changed: MixedPrecisionOptimizer.step" in found.reason
    assert "new" not in found.reason
