"""The record of symbols, compared with what is installed in a framework's environment."""

from __future__ import annotations

import copy
import json
import zipfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from precision_shim.process import symbols as _symbols
from precision_shim.process.framework import Adapter
from precision_shim.process.registry import entries, load
from precision_shim.process.settings import FEATURES, resolve
from precision_shim.seams import check
from precision_shim.seams._source import source_digest

from ..environments.symbol_record import add, facts_of, installed_digests
from ..processes.commands import python

HOW = "python tests/environments/record_symbols.py, or here: tests/environments/symbol_record.py"


def tested_version(adapter: Adapter) -> str:
    """The installed version of a framework; skips the test if that version is not tested."""
    version = metadata.version(adapter.distribution)
    if _symbols.plain(version) not in adapter.tested:
        pytest.skip(f"{adapter.framework} {version} is no tested version: no record says of it")
    return version


def hold(framework: str) -> None:
    """Assert that the record has what is installed, and nothing else for this version.

    Args:
        framework: as users write it.
    """
    adapter = load(entries(third_party=False)[framework])
    version = tested_version(adapter)
    found = list(installed_digests(adapter))
    shipped = _symbols.shipped()
    current = copy.deepcopy(shipped)
    for name, its_version, digests in found:
        add(current, name, its_version, digests)
    assert current == shipped, f"{_symbols.FILE.name} is not current: {HOW} {_symbols.FILE.name}"
    recorded = _symbols.digests_of(shipped, adapter.distribution, _symbols.plain(version))
    own = next(digests for name, _, digests in found if name == adapter.distribution)
    assert set(recorded) == {target for target, digest in own.items() if digest}, HOW
    proved = _symbols.proofs()
    asked = {one for seam in adapter.seams for one in facts_of(seam) if source_digest(one[0])}
    asked |= {
        (target.partition(":")[0], _symbols.fact_of_digest(target, digest))
        for target, digest in own.items()
        if digest
    }
    assert [one for one in asked if proved(*one[:2]) != "".join(one[2:])] == [], HOW
    settings = resolve(environ={})
    parsed = check(adapter, FEATURES, settings).predicted()
    assert check(adapter, FEATURES, settings, proved=proved).predicted() == parsed, HOW


def hold_as_a_wheel(framework: str, folder: Path) -> None:
    """A wheel of what is installed can be patched as that, and none of its modules is executed.

    Args:
        framework: as users write it.
        folder: an empty one.
    """
    entry = entries(third_party=False)[framework]
    tested_version(load(entry))
    wheel = folder / "given-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as made:
        for package in entry.packages:
            spec = find_spec(package)
            assert spec is not None
            for place in map(Path, spec.submodule_search_locations or ()):
                for file in place.rglob("*.py"):
                    text = file.read_text(encoding="utf-8")
                    planted = f"raise SystemExit('executed {file.name}')\n{text}"
                    made.writestr(f"{package}/{file.relative_to(place).as_posix()}", planted)
    words = ("doctor", "--against", wheel, "--framework", framework, "--json")
    done = python("-m", "precision_shim", *words, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert told["ok"]
