"""A framework's own tests, which no wheel contains: fetched, and run with the shim on or off.

The framework's ``conftest.py`` files are replaced by one that records each test's outcome. A test
that fails because of this replacement fails with the shim on and off.
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

from ..processes.rank_server import Ranks

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

PASSED = "passed call"
"""The outcome of a test that passed."""

Start = Callable[[list[str], dict[str, str], Path], str]
"""Runs pytest with arguments, an environment and a folder; returns pytest's output."""


def in_a_fork_of(ranks: Ranks) -> Start:
    """Return a function that runs pytest in a fork of a process with the slow imports done."""

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
    """Run pytest as a user does."""
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
        said: the end of pytest's output.
    """

    outcomes: Mapping[str, str]
    said: str

    @property
    def passed(self) -> int:
        return list(self.outcomes.values()).count(PASSED)

    def names(self, outcome: str) -> set[str]:
        """Names of the test functions with this outcome."""
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
        folder: the tests' folder, in which pytest runs.
        files: the test files, relative to the folder; missing files are left out.
        least: computes from the number of tests how many must pass.
        start: how pytest is started.
        environment: variables that are added to the inherited ones.
        conftest: the path of our ``conftest.py``, relative to the folder.
        prelude: our ``conftest.py``'s code before it imports ``precision_shim``.
        install: our ``conftest.py``'s code that installs the shim.
        markers: the markers that the tests use.
        options: pytest's.
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
    options: Sequence[str] = ()

    def run(self, *, on: bool) -> Ended:
        """Run the tests with the shim on or off, and assert that it was on or off."""
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
        # Some test modules fail at import, because they need packages that are not installed.
        options += ["--continue-on-collection-errors", "--timeout=120", *self.options]
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
    """Check a path out into a folder, from the first available commit; skips if there is none.

    Args:
        folder: an existing, empty one.
        url: of the repository.
        commits: hashes or tags, in order of preference.
        path: the file or folder in the repository.
    """

    def git(*command: str) -> str:
        """Run a git command; returns its error output."""
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
