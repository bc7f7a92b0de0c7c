"""Goes through what has to hold before a release, in order; says what does not and ends with 1.

    git tag v0.1.0 && python .ci/release.py            # all of it; pushes nothing
    python .ci/release.py --dry-run                    # looks, and says which commands it would run

The last line is the command that publishes, for a person to run: it starts the workflow release.
"""

from __future__ import annotations

import argparse
import datetime
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = (
    ("wheel and source package, as the workflow builds and checks them", "tox run -e package"),
    ("the site", "tox run -e docs"),
    ("every link of the docs", "tox run -e docs -- linkcheck"),
    # tox installs the built wheel into each framework's environment.
    ("the wheel in the newest of each framework", "tox run-parallel -p 2"),
    ("the wheel in all others", "tox run-parallel -p 2 -m matrix"),
    ("what takes long there", "tox run-parallel -p 2 -m release"),
)


def version_of(root: Path) -> str:
    """The version that the wheel will have, by this commit's tag; empty without one."""
    tags = _git(root, "tag", "--points-at", "HEAD").split()
    versions = [one[1:] for one in tags if re.fullmatch(r"v\d+\.\d+\.\d+(rc\d+)?", one)]
    return versions[0] if len(versions) == 1 else ""


def tree(root: Path) -> str:
    """Nothing is changed and nothing is untracked."""
    changed = _git(root, "status", "--porcelain").splitlines()
    return f"changed or untracked: {', '.join(line[3:] for line in changed)}" if changed else ""


def tag(root: Path) -> str:
    """The commit has one tag that is a version."""
    tags = _git(root, "tag", "--points-at", "HEAD").split()
    return "" if version_of(root) else f"this commit has the tags {tags}, and not one like v1.2.0"


def changelog(root: Path) -> str:
    """The newest section is this version's, with a date that has come."""
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(r"^## \[([^\]]+)\](?: - (\d{4}-\d\d-\d\d))?$", text, re.MULTILINE)
    if found is None or found[1] != version_of(root):
        wanted = version_of(root) or "a tag"
        return f"its newest section is {found and found[0]!r}, and not that of {wanted}"
    if (
        found[2] is None
        or found[2] > datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    ):
        return f"{found[0]!r} has no date, or one to come"
    return ""


def citation(root: Path) -> str:
    """CITATION.cff names this version."""
    text = (root / "CITATION.cff").read_text(encoding="utf-8")
    found = re.search(r"^version: (\S+)$", text, re.MULTILINE)
    return "" if found and found[1] == version_of(root) else "it names another version"


CHECKS: tuple[tuple[str, Callable[[Path], str]], ...] = (
    ("working tree", tree),
    ("tag", tag),
    ("CHANGELOG.md", changelog),
    ("CITATION.cff", citation),
)


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.rstrip("\n")


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Go through the list; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="run no command of the list")
    dry = parser.parse_args(arguments).dry_run
    print(f"precision_shim {version_of(root) or 'without a version'}")
    wrong = 0
    for name, check in CHECKS:
        problem = check(root)
        wrong += bool(problem)
        print(f"  {'NO' if problem else 'ok'}  {name}{f': {problem}' if problem else ''}")
    for name, command in COMMANDS:
        if dry or wrong:
            print(f"  --  {name}: {command}")
            continue
        print(f"  ..  {name}: {command}", flush=True)
        failed = subprocess.run(shlex.split(command), cwd=root, check=False).returncode
        wrong += bool(failed)
        print(f"  {'NO' if failed else 'ok'}  {name}")
    if wrong:
        print(f"{wrong} of the list do not hold: no release")
        return 1
    print(f"publish with: git push origin v{version_of(root)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
