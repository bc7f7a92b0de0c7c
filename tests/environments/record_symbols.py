"""Write the record of symbols anew from the environments that tox has made.

    python tests/environments/record_symbols.py [FOLDER]

FOLDER is where tox keeps its environments (``.tox``). Each pinned environment's own Python looks
at what is installed there, with the sources of this checkout; the file is
``adapters/precision_shim_adapters/symbols.json``. An environment that is not there is named, and
its versions are then not in the file.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "shim"), str(ROOT / "adapters")]

from precision_shim_adapters.frameworks import FRAMEWORKS  # noqa: E402


def pinned() -> list[str]:
    """The environments of tested versions, by the files that pin them."""
    tested = {one.framework: one.tested for one in FRAMEWORKS}
    found = []
    for file in sorted(Path(__file__).parent.glob("*-[0-9]*.txt")):
        framework, _, version = file.stem.rpartition("-")
        # A tag's own name for itself may have a suffix: 0.5.0 is 0.5.0rc0.
        if any(one.startswith(version) for one in tested.get(framework, ())):
            found.append(file.stem)
    return found


def main() -> int:
    """Record them one after the other; returns how many are missing."""
    folder = Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else ROOT / ".tox"
    record = ROOT / "adapters" / "precision_shim_adapters" / "symbols.json"
    missing = [name for name in pinned() if not (folder / name / "bin" / "python").exists()]
    if missing == pinned():
        print(f"{folder} has none of {', '.join(missing)}: tox makes them", file=sys.stderr)
        return len(missing)
    record.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "shim"), str(ROOT / "adapters")]),
    }
    for name in pinned():
        if name not in missing:
            python = str(folder / name / "bin" / "python")
            command = [python, "-m", "precision_shim", "doctor", "--record", str(record)]
            subprocess.run(command, cwd=folder, env=environment, check=True)
    for name in missing:
        print(f"not in {folder}, and so not recorded: {name}", file=sys.stderr)
    return len(missing)


if __name__ == "__main__":
    raise SystemExit(main())
