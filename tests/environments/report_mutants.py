"""Change the code that seams depend on in every possible way, and report how each change ended.

    python tests/environments/report_mutants.py [FOLDER]

FOLDER is the folder of tox's environments (default ``.tox``). Each framework's newest pinned
environment changes its sources (``tests/mutants.py``) and its imported modules
(``tests/mutated_behaviour.py``). The exit status is 1 if a change survives and
``JUDGED`` does not list the change.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from report_upstream import ROOT, newest

KNOWN = ("refused", "refused on arrival", "absent", "right", "test", "judged", "survives")


def ended(module: str, framework: str, python: Path) -> list[list[str]]:
    """Class, target, detail, end and reason of each change."""
    sources = os.pathsep.join([str(ROOT / "shim"), str(ROOT / "adapters")])
    done = subprocess.run(
        [str(python), "-W", "ignore", "-m", module, framework, "--json"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": sources, "PRECISION_SHIM": "0"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    found: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    """Print a table of the classes of changes, then the survivors, judged or not."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".tox"
    told: list[list[str]] = []
    for framework, environment in newest().items():
        python = folder / environment / "bin" / "python"
        if not python.exists():
            print(f"not there, tox makes it: {python}", file=sys.stderr)
            return 2
        found = [
            one
            for module in ("tests.mutants", "tests.mutated_behaviour")
            for one in ended(module, framework, python)
        ]
        counts = Counter(one[3] for one in found)
        print(f"{environment}: {len(found)} changes; " + text(counts), flush=True)
        told += found
    print(f"\nall: {len(told)} changes; " + text(Counter(one[3] for one in told)))
    for kind in dict.fromkeys(one[0] for one in told):
        of_kind = [one for one in told if one[0] == kind]
        print(f"{kind:<22} {len(of_kind):>5}; " + text(Counter(one[3] for one in of_kind)))
    for state in ("judged", "survives"):
        left = sorted({(one[0], one[1], one[2], one[4]) for one in told if one[3] == state})
        print(f"\n{state}: {len(left)}")
        for one in left:
            print("  " + ": ".join(one))
    return 1 if any(one[3] == "survives" for one in told) else 0


def text(counts: Counter[str]) -> str:
    """How many changes ended in which way, in words."""
    return ", ".join(f"{counts[state]} {state}" for state in KNOWN if counts[state])


if __name__ == "__main__":
    raise SystemExit(main())
