"""Marks tests that only the newest version of a framework runs."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from precision_shim.process.registry import entries, load
from precision_shim.process.symbols import plain


def on_the_newest(framework: str) -> pytest.MarkDecorator:
    """Leave a test to the environment of the framework's newest tested version."""
    adapter = load(entries(third_party=False)[framework])
    installed = plain(version(adapter.distribution))
    return pytest.mark.skipif(installed != adapter.tested[-1], reason="held on the newest version")
