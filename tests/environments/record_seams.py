"""Write the record of each adapter's table of seams anew, ``seams.json`` beside its ``adapter.py``.

    tox run -e unit-py313-wrapt2 -- python tests/environments/record_seams.py

It needs torch, and no framework. An adapter that makes wrappers within functions has no record.
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

if __name__ == "__main__":
    root = Path(__file__).parents[2]
    sys.path[:0] = [str(root / one) for one in ("shim", "adapters", "tools")]

from precision_shim.process import registry
from precision_shim.process.framework import Adapter
from precision_shim.seams import Seam
from precision_shim.seams._seam import REQUIRED, kind_of, name_of

_GIVEN = {one.name: one.default for one in fields(Seam)}


def record_of(entry: Adapter) -> str:
    """The text of an adapter's record; empty if a function has no name in its module."""
    seams: tuple[Seam, ...] = resolve_name(entry.place)
    functions: dict[str, Any] = {}
    rows = []
    for one in seams:
        row = {name: getattr(one, name) for name, default in _GIVEN.items()}
        for role in ("wrapper", "native"):
            function = row[role]
            if function is None:
                continue
            row[role] = name = name_of(function)
            if "<" in name or resolve_name(name) is not function:
                return ""
            reads = one.reads.items() if role == "wrapper" else ()
            told = [[key] if value is REQUIRED else [key, value] for key, value in reads]
            functions[name] = [kind_of(function), told]
        rows.append({key: value for key, value in row.items() if value != _GIVEN[key]})
        rows[-1]["wrapper"] = row["wrapper"]
    head = {"source": registry.source_of_adapters(), "functions": functions}
    lines = ",\n".join(map(json.dumps, rows))
    return f'{json.dumps(head)[:-1]},\n"seams": [\n{lines}\n]}}\n'


def main() -> None:
    """Write all records."""
    for entry in registry.entries(third_party=False).values():
        file, text = registry.record_file(entry.place), record_of(entry)
        if file is not None and text:
            file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
