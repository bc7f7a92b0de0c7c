"""Add versions to the record of digests, which ``precision_shim.process.symbols`` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from precision_shim.process.symbols import Record, in_order, plain


def write(record: Record, path: Path) -> None:
    """Write a record in a fixed order, so that equal records give equal files."""
    ordered = {
        distribution: {
            target: {digest: in_order(versions) for digest, versions in sorted(digests.items())}
            for target, digests in sorted(targets.items())
        }
        for distribution, targets in sorted(record.items())
    }
    path.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


def add(record: Record, distribution: str, version: str, digests: Mapping[str, str]) -> None:
    """Add a version's symbols to ``record`` in place, and remove the version's earlier digests.

    ``version`` loses a local part, such as ``+cu128``. ``digests`` is by ``"module:name"``; a
    digest is empty if this version lacks the symbol.
    """
    version = plain(version)
    known = record.setdefault(distribution, {})
    for target, current in digests.items():
        kept = {
            earlier: [other for other in versions if other != version]
            for earlier, versions in known.pop(target, {}).items()
        }
        if current:
            kept[current] = in_order([*kept.get(current, ()), version])
        kept = {recorded: versions for recorded, versions in kept.items() if versions}
        if kept:
            known[target] = kept
    if not known:
        del record[distribution]
