"""The message of ``demo --rl`` on a job that died: its first error, and the log's end."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")

from examples.demo import rl

# The log of a dying vLLM engine: first the cause, and long after it verl's last error.
LOG = [
    'UserWarning: veomni engine is not available: ModuleNotFoundError("No module")',
    "(EngineCore pid=7) ERROR 11-24 [core.py:1366] ValueError: No available memory for the cache",
    "(EngineCore pid=7) Traceback (most recent call last):",
    "RuntimeError: Engine core initialization failed. See root cause above.",
]


def test_the_first_error_is_named() -> None:
    assert rl.first_error(LOG) == [LOG[1]]
    assert rl.first_error(LOG[:1]) == []
    assert rl.first_error([f"OSError: {'x' * 9999}"]) == [f"OSError: {'x' * 491}"]
