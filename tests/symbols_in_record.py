"""The record of symbols, held to what is installed in a framework's environment."""

from __future__ import annotations

import copy

import pytest

from precision_shim import _symbols
from precision_shim._registry import entries
from precision_shim.cli._against import installed_digests

HOW = "python tests/environments/record_symbols.py, or here: precision-shim doctor --record"


def hold(framework: str) -> None:
    """What is installed is in the shipped record, and nothing else is recorded for this version.

    Args:
        framework: as users write it.
    """
    entry = entries(third_party=False)[framework]
    adapter = entry.load()
    found = list(installed_digests(adapter))
    version = next(version for name, version, _ in found if name == adapter.distribution)
    if _symbols.plain(version) not in adapter.tested:
        pytest.skip(f"{framework} {version} is no tested version, and not recorded")
    shipped = _symbols.shipped()
    current = copy.deepcopy(shipped)
    for name, its_version, digests in found:
        _symbols.add(current, name, its_version, digests)
    assert current == shipped, f"{_symbols.FILE.name} is not current: {HOW} {_symbols.FILE.name}"
    recorded = _symbols.digests_of(shipped, adapter.distribution, _symbols.plain(version))
    own = next(digests for name, _, digests in found if name == adapter.distribution)
    assert set(recorded) == {target for target, digest in own.items() if digest}, HOW
