"""Change our own code in every way that mutmut knows, and say which changes no test notices.

    python tests/environments/mutate.py rules|scaling|audit [FOLDER] [--only PATTERN]

FOLDER is where the changed copy goes. Tests that run a framework are not among those that mutmut
runs here: it imports what they need once and forks for each change, and a test that starts processes
of its own would take most of the time.

mutmut changes the functions that have no decorator, and no constants outside of functions. Left out
are lines that hold nothing but a part of a message.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = {
    "rules": ("rules", ["tests/unit/rules", "tests/unit/scaling/test_record.py"]),
    "scaling": ("scaling", ["tests/unit/scaling", "tests/unit/fp16", "tests/scaling/test_files.py"]),
    "audit": (
        "auditing",
        ["tests/unit/auditing", "tests/audit/test_torch.py", "tests/audit/test_command.py"],
    ),
}
"""Our package, and the tests that are run for each change in it, by part."""

MESSAGE = r'^\s*\(?f?"[^"]* [^"]*"[\s),:]*$'
"""A line that is a string with a blank in it, and nothing else."""

EXAMPLES = "10"
"""How many examples hypothesis tries for each change; a survivor is tried with 100 once more."""

ENDS = {0: "survived", 1: "killed", 3: "killed", 33: "no test", 34: "skipped", 36: "too long"}
SETTINGS = """
[tool.mutmut]
source_paths = ["src/"]
only_mutate = ["src/precision_shim/{package}/*"]
do_not_mutate_patterns = ['{message}']
also_copy = ["adapters", "docs", "examples", "benchmarks", "README.md", "CHANGELOG.md"]
process_isolation = "forkserver"
pytest_add_cli_args = ["-p", "no:cacheprovider", "-W", "ignore", "--hypothesis-seed=0"]
pytest_add_cli_args_test_selection = {tests}
use_git_change_detection = false
track_dependencies = false
"""


def prepare(folder: Path, part: str) -> None:
    """Copy what is changed and what the tests read."""
    package, tests = PARTS[part]
    shutil.rmtree(folder, ignore_errors=True)
    leave = shutil.ignore_patterns("__pycache__", ".tox")
    # mutmut knows modules by their path below "src".
    shutil.copytree(ROOT / "shim", folder / "src", ignore=leave)
    for name in ("adapters", "tests", "docs", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=leave)
    for name in ("README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder)
    # A folder that Python did not find at its start it never looks into: the tests would run on
    # the code as it is installed, and notice nothing.
    for name in ("src", "adapters"):
        (folder / "mutants" / name).mkdir(parents=True)
    settings = SETTINGS.format(package=package, message=MESSAGE, tests=json.dumps(tests))
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (folder / "pyproject.toml").write_text(text + settings, encoding="utf-8")


def mutmut(folder: Path, patterns: list[str], **variables: str) -> None:
    """Run mutmut in the copy."""
    mutants = folder / "mutants"
    subprocess.run(
        [sys.executable, "-m", "mutmut", "run", "--max-children", "1", *patterns],
        cwd=folder,
        env={
            **os.environ,
            # Processes that a test starts see the changed copy too.
            "PYTHONPATH": os.pathsep.join(
                [str(mutants / "src"), str(mutants / "adapters"), os.environ.get("PYTHONPATH", "")]
            ),
            **variables,
        },
        stdout=(folder / "mutmut.log").open("a"),
        stderr=subprocess.STDOUT,
        check=True,
    )


def ends(folder: Path, package: str) -> dict[str, dict[str, str]]:
    """How each change ended, by module and mutmut's name for it."""
    found = {}
    for file in sorted((folder / "mutants" / "src" / "precision_shim" / package).glob("*.meta")):
        codes = json.loads(file.read_text(encoding="utf-8"))["exit_code_by_key"]
        if codes:
            found[file.name.removesuffix(".py.meta")] = {
                name: ENDS.get(code, f"ended with {code}") for name, code in codes.items()
            }
    return found


def change(folder: Path, name: str) -> str:
    """The lines that a change takes away and those that it brings."""
    done = subprocess.run(
        [sys.executable, "-m", "mutmut", "show", name],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [one for one in done.stdout.splitlines() if re.match(r"[-+](?![-+])", one)]
    return "\n".join(f"    {one[0]} {one[1:].strip()}" for one in lines)


def main() -> int:
    """Print figures by module, and each change that no test notices."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / ".tox" / "mutation")
    parser.add_argument("--only", default="", help="changes whose name begins with it")
    chosen = parser.parse_args()
    folder = chosen.folder / chosen.part
    package, _ = PARTS[chosen.part]
    prepare(folder, chosen.part)
    patterns = [f"precision_shim.{package}.{chosen.only}*"]
    mutmut(folder, patterns, HYPOTHESIS_EXAMPLES=EXAMPLES)
    told = ends(folder, package)
    again = [name for of in told.values() for name, end in of.items() if end == "survived"]
    if again:
        mutmut(folder, again)
        told = ends(folder, package)
    for module, of in told.items():
        counts = Counter(of.values())
        print(f"{module:<16} {len(of):>4}: " + ", ".join(f"{n} {end}" for end, n in counts.items()))
    alive = [name for of in told.values() for name, end in of.items() if end != "killed"]
    for name in alive:
        print(f"\n{name}\n{change(folder, name)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
