"""Write the record of symbols anew from the environments that tox has made.

    python tests/environments/record_symbols.py [FOLDER]

FOLDER is the folder of tox's environments (default ``.tox``). Each pinned environment's own Python
reads what is installed there, with the sources of this checkout. The record is
``adapters/precision_shim_adapters/symbols.json``, with ``sources.json`` beside it. A missing
environment is named, and the record then lacks its versions.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [str(ROOT / root) for root in ("shim", "adapters", "tools")]
sys.path[:0] = SOURCES

from precision_shim_adapters.frameworks import FRAMEWORKS  # noqa: E402


def pinned() -> list[str]:
    """The environments that pin a tested version, by the names of their files."""
    tested = {one.framework: one.tested for one in FRAMEWORKS}
    found = []
    for file in sorted(Path(__file__).parent.glob("*-[0-9]*.txt")):
        framework, _, version = file.stem.rpartition("-")
        # A tag's package may state a version with a suffix: tag 0.5.0 states 0.5.0rc0.
        if any(one.startswith(version) for one in tested.get(framework, ())):
            found.append(file.stem)
    return found


def main() -> int:
    """Record all environments; returns how many are missing."""
    folder = Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else ROOT / ".tox"
    record = ROOT / "adapters" / "precision_shim_adapters" / "symbols.json"
    missing = [name for name in pinned() if not (folder / name / "bin" / "python").exists()]
    if missing == pinned():
        print(f"{folder} has none of {', '.join(missing)}: tox makes them", file=sys.stderr)
        return len(missing)
    record.unlink(missing_ok=True)
    record.with_name("sources.json").unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES)}
    for name in pinned():
        if name not in missing:
            python = str(folder / name / "bin" / "python")
            command = [python, str(Path(__file__).with_name("symbol_record.py")), str(record)]
            subprocess.run(command, cwd=folder, env=environment, check=True)
    for name in missing:
        print(f"not in {folder}, and so not recorded: {name}", file=sys.stderr)
    return len(missing)


if __name__ == "__main__":
    raise SystemExit(main())
