"""Judge the newest release of each framework and of the packages that they share.

    python tests/environments/report_upstream.py [FOLDER] [PATH ...]

FOLDER is the folder of tox's environments (default ``.tox``). The newest wheels are downloaded
without their dependencies. Each framework's newest pinned environment judges the wheels by
``precision-shim doctor --against WHEEL``. The report names a framework that is not on the index
(NeMo-RL). Further PATHs, such as checkouts, are judged in the same way. The exit status is 1 if a
feature could not be applied, 2 if something could not be judged.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).parents[2]
SOURCES = [str(ROOT / root) for root in ("shim", "adapters", "tools")]
sys.path[:0] = SOURCES

from precision_shim_adapters.frameworks import FRAMEWORKS  # noqa: E402

SHARED = ("megatron-core", "megatron-bridge")
ON_MEGATRON = {
    one.framework
    for one in FRAMEWORKS
    if any(target.startswith("megatron.") for target in one.effects)
}
"""Frameworks on Megatron, which depend on the shared packages."""


def newest() -> dict[str, str]:
    """Each framework's newest pinned environment."""
    found: dict[str, Version] = {}
    for file in Path(__file__).parent.glob("*-[0-9]*.txt"):
        framework, _, version = file.stem.rpartition("-")
        if not re.search(r"\d", framework):  # skip verl-0.9.1-core0.19.2: two other pins
            found[framework] = max(Version(version), found.get(framework, Version("0")))
    return {framework: f"{framework}-{version}" for framework, version in sorted(found.items())}


def download(name: str, folder: Path) -> Path | None:
    """Download a distribution's newest wheel for Python 3.12; ``None`` if there is none."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    target = ["--python-version", "3.12", "-d", str(folder / name), name]
    subprocess.run([*command, *target], check=False, stderr=subprocess.DEVNULL)
    return next((folder / name).glob("*.whl"), None)


def judge(path: Path, framework: str, python: Path) -> int:
    """Print the doctor's report on a path for one framework."""
    print(f"\n## {path.name}, in {python.parents[1].name}\n", flush=True)
    command = [str(python), "-m", "precision_shim", "doctor", "--against", str(path)]
    sources = os.pathsep.join(SOURCES)
    done = subprocess.run(
        [*command, "--framework", framework], env={**os.environ, "PYTHONPATH": sources}, check=False
    )
    return done.returncode


def main() -> int:
    """Judge everything; returns the worst exit status."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".tox"
    pythons = {
        framework: folder / environment / "bin" / "python"
        for framework, environment in newest().items()
    }
    missing = [str(python) for python in pythons.values() if not python.exists()]
    if missing:
        print(f"not there, tox makes them: {', '.join(missing)}", file=sys.stderr)
        return 2
    worst = 0
    with tempfile.TemporaryDirectory() as made:
        for name in (*pythons, *SHARED):
            wheel = download(name, Path(made))
            if wheel is None:
                print(f"\n{name}: no wheel on the index; give a checkout's path", file=sys.stderr)
                worst = 2
                continue
            for framework in [name] if name in pythons else sorted(ON_MEGATRON & pythons.keys()):
                worst = max(worst, judge(wheel, framework, pythons[framework]))
        for path in map(Path, sys.argv[2:]):
            results = [judge(path, framework, python) for framework, python in pythons.items()]
            # The path need not contain every framework.
            worst = max(worst, max((one for one in results if one != 2), default=2))
    return worst


if __name__ == "__main__":
    raise SystemExit(main())
