"""Change our own code in every way that mutmut knows, and report which changes no test notices.

    python tests/environments/mutate.py rules|megatron|scaling|audit [FOLDER] [--only PATTERN]

FOLDER receives the changed copy. mutmut imports what the tests need once and forks for each change.
Tests that run a framework or start processes are left out.

mutmut changes only functions without a decorator, and no constants outside of functions. Lines that
contain only a part of a message are not changed.
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
FILES = "tests/scaling/test_files.py"
WISHES = "tests/unit/test_wishes.py"
TORCH = "tests/audit/test_torch.py"
PARTS = {  # the package to change, and the tests to run for each change
    "rules": (
        "precision_shim/precision",
        ["tests/unit/precision", "tests/unit/scaling/test_record.py", WISHES, FILES],
    ),
    "megatron": ("precision_shim_adapters/megatron/deciding", ["tests/unit/megatron", WISHES]),
    "scaling": ("precision_shim/scaling", ["tests/unit/scaling", "tests/unit/fp16", FILES]),
    "audit": (
        "precision_shim/auditing",
        ["tests/unit/auditing", TORCH, "tests/audit/test_command.py"],
    ),
}
LEFT_OUT = [
    # These tests start processes.
    f"{FILES}::test_a_process_killed_during_a_save_leaves_the_old_file_or_the_new",
    f"{FILES}::test_a_kill_in_the_middle_of_the_text_leaves_the_old_file",
    f"{FILES}::test_a_full_disk_is_told_and_leaves_the_old_file",
    f"{FILES}::test_a_directory_without_write_access_is_told",
    f"{TORCH}::test_it_works_in_a_process_without_the_shim",
    "tests/audit/test_command.py::test_it_needs_no_torch",
    # mutmut's own calls take time.
    f"{TORCH}::test_a_large_model_costs_some_walks_over_its_tensors",
]
"""Tests that are not run."""

WATCHING = ("kept", "watching")
NOT_CHANGED = [f"*/auditing/{one}.py" for one in WATCHING]
"""Modules that only watch updates and judge nothing; their tests train for minutes."""

MESSAGE = r'^\s*\(?f?"[^"]* [^"]*"[\s),:]*$'
"""Matches a line that contains only a string with a blank in it."""

EXAMPLES = "10"
"""How many examples hypothesis tries for each change; a survivor is tried with 100 once more."""

ENDS = {0: "survived", 1: "killed", 3: "killed", 33: "no test", -24: "too long", 36: "too long"}
SETTINGS = """
[tool.mutmut]
source_paths = ["src/"]
only_mutate = ["src/{package}/*"]
do_not_mutate_patterns = ['{message}']
do_not_mutate = {left}
also_copy = ["adapters", "docs", "examples", "benchmarks", "README.md", "CHANGELOG.md"]
process_isolation = "forkserver"
pytest_add_cli_args = ["-p", "no:cacheprovider", "-W", "ignore", "--hypothesis-seed=0"]
pytest_add_cli_args_test_selection = {tests}
use_git_change_detection = false
timeout_constant = 30.0
track_dependencies = false
"""


def prepare(folder: Path, part: str) -> None:
    """Copy the package to change and the files that the tests read."""
    package, tests = PARTS[part]
    shutil.rmtree(folder, ignore_errors=True)
    leave = shutil.ignore_patterns("__pycache__", ".tox")
    # mutmut names modules by their path below "src".
    shutil.copytree(ROOT / "shim", folder / "src", ignore=leave)
    shutil.copytree(ROOT / "adapters", folder / "src", ignore=leave, dirs_exist_ok=True)
    for name in ("adapters", "tests", "docs", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=leave)
    for name in ("README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder)
    # Create the folder now: Python ignores a path entry for good if the folder is missing when
    # Python starts. Without the folder the tests would run on the installed code and notice no
    # change.
    (folder / "mutants" / "src").mkdir(parents=True)
    tests = [*tests, *(f"--deselect={one}" for one in LEFT_OUT)]
    settings = SETTINGS.format(
        package=package, message=MESSAGE, left=json.dumps(NOT_CHANGED), tests=json.dumps(tests)
    )
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (folder / "pyproject.toml").write_text(text + settings, encoding="utf-8")


def mutmut(folder: Path, patterns: list[str], **variables: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "mutmut", "run", "--max-children", "1", *patterns],
        cwd=folder,
        env={
            **os.environ,
            # Processes that a test starts import the changed copy too.
            "PYTHONPATH": os.pathsep.join(
                [str(folder / "mutants" / "src"), os.environ.get("PYTHONPATH", "")]
            ),
            **variables,
        },
        stdout=(folder / "mutmut.log").open("a"),
        stderr=subprocess.STDOUT,
        check=True,
    )


def ends(folder: Path, package: str) -> dict[str, dict[str, str]]:
    """How each change ended, by module and by mutmut's name for the change."""
    found = {}
    for file in sorted((folder / "mutants" / "src" / package).glob("*.meta")):
        codes = json.loads(file.read_text(encoding="utf-8"))["exit_code_by_key"]
        if codes:
            found[file.name.removesuffix(".py.meta")] = {
                name: "not run" if code is None else ENDS.get(code, f"ended with {code}")
                for name, code in codes.items()
            }
    return found


def change(folder: Path, name: str) -> str:
    """The lines that a change removes and adds."""
    done = subprocess.run(
        [sys.executable, "-m", "mutmut", "show", name],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [one for one in done.stdout.splitlines() if re.match(r"[-+](?![-+])", one)]
    return "\n".join(f"    {one[0]} {one[1:].strip()}" for one in lines)


def is_wording(lines: str) -> bool:
    """Whether a change only alters letters of a text for people, a string with a blank."""
    before, after = (
        [one[6:] for one in lines.splitlines() if one[4] == sign] for sign in ("-", "+")
    )
    texts = re.findall(r'"([^"]* [^"]*)"', " ".join(before))
    return any(
        [one.replace(text, new) for one in before] == after
        for text in texts
        for new in (f"XX{text}XX", text.lower(), text.upper())
    )


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
    patterns = [f"{package.replace('/', '.')}.{chosen.only}*"]
    mutmut(folder, patterns, HYPOTHESIS_EXAMPLES=EXAMPLES)
    told = ends(folder, package)
    again = [
        name for of in told.values() for name, end in of.items() if end in ("survived", "too long")
    ]
    if again:
        mutmut(folder, again)
        told = ends(folder, package)
    for module, of in told.items():
        counts = Counter(of.values())
        print(f"{module:<16} {len(of):>4}: " + ", ".join(f"{n} {end}" for end, n in counts.items()))
    changes = {
        f"{name}: {end}": change(folder, name)
        for of in told.values()
        for name, end in of.items()
        if end not in ("killed", "not run")
    }
    wording = [name for name, lines in changes.items() if is_wording(lines)]
    print(f"wording of messages, not shown: {len(wording)}")
    for name, lines in changes.items():
        if name not in wording:
            print(f"\n{name}\n{lines}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
