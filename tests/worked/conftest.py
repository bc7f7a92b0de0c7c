"""Fixtures: the two trainers, installed during a test."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SITE = Path(__file__).with_name("site")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the trainers, the adapters and their entry points on the path."""
    monkeypatch.syspath_prepend(str(SITE))
    yield
    for name in list(sys.modules):
        if name.partition(".")[0] in ("tinytron", "tinyfsdp", "tinytron_shim", "tinyfsdp_shim"):
            del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str, str], None]:
    """Return a function that puts a changed copy of a trainer's module before the installed one."""

    def change(module: str, before: str, now: str) -> None:
        package, _, name = module.partition(".")
        folder = tmp_path / "changed"
        shutil.copytree(SITE / package, folder / package)
        file = folder / package / f"{name}.py"
        source = file.read_text("utf-8")
        assert before in source
        file.write_text(source.replace(before, now), "utf-8")
        monkeypatch.syspath_prepend(str(folder))

    return change


@pytest.fixture
def on(shim: Callable[..., Any]) -> Callable[..., Any]:
    """``install()`` for one framework, whose adapter the entry points name."""

    def install(framework: str, **settings: Any) -> Any:
        return shim(frameworks=[framework], settings=settings, strict=True, export=False)

    return install
