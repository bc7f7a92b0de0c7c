"""What ``demo --rl`` says of a job that died: the error that came first, and the log's end."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")

from examples.demo import rl

# As vLLM's engine dies: the cause, and long after it what verl ends with.
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
