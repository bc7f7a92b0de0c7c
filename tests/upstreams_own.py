"""A framework's own tests, which no wheel has: fetched, and run with the shim on or off.

Their own ``conftest.py`` files are replaced by one that notes what comes of each test. What then
fails, fails with the shim on and off.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from .rank_server import Ranks

_CONFTEST = """
import json, os, pathlib

{prelude}
import precision_shim

outcomes = {{}}

if os.environ["SHIM_IS_ON"] == "1":
    {install}


def pytest_configure(config):
    for name in {markers!r}:
        config.addinivalue_line("markers", name)


def pytest_runtest_logreport(report):
    if report.outcome != "passed" or report.when == "call":
        outcomes.setdefault(report.nodeid, f"{{report.outcome}} {{report.when}}")


def pytest_collectreport(report):
    if report.outcome != "passed":
        outcomes.setdefault(report.nodeid, f"{{report.outcome}} collect")


def pytest_sessionfinish(session):
    told = precision_shim.status().frameworks.get({framework!r})
    wrapped = [seam.target for seam in told.seams if seam.state == "wrapped"] if told else []
    found = {{"outcomes": outcomes, "wrapped": wrapped}}
    pathlib.Path(os.environ["OUTCOMES"]).write_text(json.dumps(found))
"""

Start = Callable[[list[str], dict[str, str], Path], str]
"""Runs pytest with these arguments, this environment and in this folder; returns its output."""


def in_a_fork_of(ranks: Ranks) -> Start:
    """Start pytest in a process that has imported what takes longest."""

    def start(arguments: list[str], environment: dict[str, str], folder: Path) -> str:
        ranks(
            "tests",
            world=1,
            timeout=1500,
            arguments=arguments,
            environment=environment,
            cwd=str(folder),
        )
        return ranks.said[0]

    return start


def in_a_new_python(arguments: list[str], environment: dict[str, str], folder: Path) -> str:
    """Start pytest as a user does."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=environment,
        timeout=900,
    )
    return done.stdout + done.stderr


@dataclass(frozen=True)
class Ended:
    """What came of the tests.

    Attributes:
        outcomes: by test.
        said: the end of the output.
    """

    outcomes: Mapping[str, str]
    said: str

    @property
    def passed(self) -> int:
        """How many passed."""
        return list(self.outcomes.values()).count("passed call")

    def names(self, outcome: str) -> set[str]:
        """The functions of the tests that ended so."""
        return {
            test.rpartition("::")[2].partition("[")[0]
            for test, ended in self.outcomes.items()
            if ended.split()[0] == outcome
        }


@dataclass(frozen=True)
class Own:
    """Tests of a framework's own.

    Attributes:
        framework: whose.
        folder: where they are and run.
        files: which, from the folder; those that are not there are left out.
        least: how many have to pass, of so many.
        start: how pytest is started.
        environment: variables beside the inherited ones.
        conftest: where ours goes, from the folder.
        prelude: what it does before ``precision_shim`` is imported.
        install: how it switches the shim on.
        markers: those that the tests use.
    """

    framework: str
    folder: Path
    files: Sequence[str]
    least: Callable[[int], float] = lambda count: count
    start: Start = in_a_new_python
    environment: Mapping[str, str] = field(default_factory=dict)
    conftest: str = "conftest.py"
    prelude: str = ""
    install: str = "precision_shim.install()"
    markers: tuple[str, ...] = ()

    def run(self, *, on: bool) -> Ended:
        """Run them with the shim on or off, and hold that it was."""
        (self.folder / self.conftest).write_text(
            _CONFTEST.format(
                prelude=self.prelude,
                install=self.install,
                markers=self.markers,
                framework=self.framework,
            )
        )
        outcomes = self.folder.with_name(f"{self.folder.name}-{on}.json")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PRECISION_SHIM")}
        options = ["-q", "-W", "ignore", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir=."]
        # Some need what is not installed as soon as they are imported.
        options += ["--continue-on-collection-errors", "--timeout=120"]
        said = self.start(
            [*options, *(file for file in self.files if (self.folder / file).exists())],
            {
                **environment,
                **self.environment,
                "SHIM_IS_ON": str(int(on)),
                "OUTCOMES": str(outcomes),
            },
            self.folder,
        )[-6000:]
        assert outcomes.exists(), said
        found = json.loads(outcomes.read_text())
        assert bool(found["wrapped"]) is on, said
        counts = dict(Counter(outcome.split()[0] for outcome in found["outcomes"].values()))
        name, state = self.folder.name, "on" if on else "off"
        print(f"{self.framework}'s own tests in {name}, shim {state}: {counts}")
        return Ended(found["outcomes"], said)


def fetch(folder: Path, url: str, commits: Sequence[str], path: str) -> Path:
    """Check a path of the first commit that can be had out into a folder; skips where none can.

    Args:
        folder: an existing, empty one.
        url: of the repository.
        commits: hashes or tags, the best first.
        path: the file or folder in the repository.
    """

    def git(*command: str) -> str:
        """Run a command of git's; returns what was wrong."""
        done = subprocess.run(
            ["git", "-c", "gc.auto=0", "-c", "maintenance.auto=false", *command],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        if not done.returncode:
            return ""
        return (done.stderr.strip().splitlines() or ["no message"])[-1]

    git("init", "--quiet")
    git("remote", "add", "origin", url)
    wrong = ""
    for commit in commits:
        wrong = git("fetch", "--quiet", "--depth=1", "--filter=blob:none", "origin", commit)
        wrong = wrong or git("checkout", "--quiet", "FETCH_HEAD", "--", path)
        if not wrong:
            return folder
    pytest.skip(f"{url} at {' or '.join(commits)} cannot be fetched: {wrong}")
