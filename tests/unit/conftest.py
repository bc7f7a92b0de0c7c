"""Fixtures of all unit tests: no variable of ours is set, and nothing is left behind."""

from __future__ import annotations

import os
import sys

import hypothesis
import pytest

# Every run tries the same examples without a time limit, and keeps no folder of examples. If
# HYPOTHESIS_EXAMPLES sets a number, hypothesis tries that many new examples.
hypothesis.settings.register_profile(
    "unit",
    derandomize="HYPOTHESIS_EXAMPLES" not in os.environ,
    max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "100")),
    database=None,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("unit")


@pytest.fixture(autouse=True)
def _clean_environment():
    before = _take_variables()
    yield
    _take_variables()
    os.environ.update(before)


def _take_variables():
    names = [name for name in os.environ if name.startswith("PRECISION_SHIM")]
    return {name: os.environ.pop(name) for name in names}


@pytest.fixture
def write_modules(tmp_path, monkeypatch):
    """Write modules into a new folder on ``sys.path``; forget them after the test.

    Call the fixture with ``{"toy/ops.py": source}``; it returns the folder.
    """
    import importlib

    root = tmp_path / "modules"
    root.mkdir()
    tops = set()
    monkeypatch.syspath_prepend(root)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(files):
        for name, source in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source, encoding="utf-8")
            tops.add(name.partition("/")[0].removesuffix(".py"))
        importlib.invalidate_caches()
        return root

    yield write
    for name in [one for one in sys.modules if one.partition(".")[0] in tops]:
        del sys.modules[name]
