"""What this project adds to tox, which loads this file because of its name.

1. An environment whose source cannot be reached is skipped; one whose install fails for any other
   reason fails. Without this, tox calls both a failure. With TOX_NO_START_AFTER, a time in seconds
   since the epoch, one whose turn comes later is skipped, too: a slow machine then runs a part of
   the matrix and says which.
2. A run ends with what came of each environment, where its time went, each environment that ran
   nothing and why, and one last line ``N passed, N failed, N skipped``. If all that ran passed, the
   status is 3 if each of these lacked its Python, its source or the time, and 4 if one ran nothing
   for another reason. If tests were to run and none did, the status is 1.
3. ``-m LABEL`` runs the label's environments in the order of the label.
4. ``-e`` takes each name in a label. In tox.ini, ``{pins}`` is the environment's file of pins.
5. Environments share bytecode. uv links one file of a package into all of them, but each would
   compile it again: 45 of the 70 seconds of CPU time that the first import of verl takes.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from configparser import ConfigParser
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from tox.config.loader.ini.factor import extend_factors
from tox.plugin import impl
from tox.session.env_select import CliEnv
from tox.tox_env.errors import Skip

try:
    from tox_uv._package import UvVenvPep517Packager
    from tox_uv._run import UvVenvRunner
except ImportError:  # a tox without tox-uv, which fetches it (requires, in tox.ini) and starts over
    UvVenvRunner = UvVenvPep517Packager = object

if TYPE_CHECKING:
    from collections.abc import Callable

    from tox.config.cli.parser import ToxParser
    from tox.config.sets import EnvConfigSet
    from tox.execute import Outcome
    from tox.session.state import State
    from tox.tox_env.api import ToxEnv
    from tox.tox_env.register import ToxEnvRegister

REPORT = "results.xml"
"""Where the tests of an environment leave their report: in its temporary directory, which tox
empties before each run."""

SLOWEST = 5
"""How many of an environment's tests the summary names."""

UNREACHABLE = re.compile(
    r"error sending request for url \((\S+)\)"
    r"|HTTP status server error \([^)]*\) for url \((\S+)\)"
    r"|An index \((\S+)\) returned a 403"
    r"|HTTP status client error \(403[^)]*\) for url \((\S+)\)"
    r"|unable to access '(\S+)': (?:Could not resolve|Failed to connect)"
    r"|(the network) was disabled"
)
"""What uv and git say of a source that does not answer, is out of order, or is barred from here.
A package that a source does not have, and versions that do not fit, read otherwise."""


@dataclass
class Result:
    """What came of an environment, in tests; one that holds no tests counts as one."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    because: str = ""
    left_out: bool = False
    has_tests: bool = False
    was_run: bool = False
    began: float = field(default_factory=time.monotonic)
    set_up: float = 0.0
    ended: float = 0.0
    slowest: list[tuple[float, str]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"

    def read(self, report: Path) -> None:
        """Take counts and times from a JUnit report of pytest's."""
        root = ElementTree.parse(report)
        for suite in root.iter("testsuite"):
            tests, failures, errors, skipped = (
                int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")
            )
            self.failed += failures + errors
            self.skipped += skipped
            self.passed += tests - failures - errors - skipped
        cases = [
            (float(one.get("time", 0)), f"{one.get('classname')}::{one.get('name')}")
            for one in root.iter("testcase")
        ]
        self.slowest = sorted(cases, reverse=True)[:SLOWEST]

    def times(self) -> str:
        """Where the time went, in one line."""
        return f"{self.ended - self.began:.0f} s, {self.set_up - self.began:.0f} to set up"


_results: dict[str, Result] = {}


class _SkipUnreachable:
    """Turns a failed install into a skip where its output says that a source was not reached."""

    def execute(self, *args: Any, **kwargs: Any) -> Outcome:
        outcome: Outcome = super().execute(*args, **kwargs)  # type: ignore[misc]
        if outcome.exit_code and str(kwargs.get("run_id")).startswith("install_"):
            said = UNREACHABLE.search(outcome.err)
            if said:
                raise Skip(f"{next(filter(None, said.groups()))} cannot be reached")
        return outcome


class Packager(_SkipUnreachable, UvVenvPep517Packager):
    """tox-uv's packager."""

    @staticmethod
    def id() -> str:
        """Name it for the runner."""
        return "skip-unreachable-package"


class Runner(_SkipUnreachable, UvVenvRunner):
    """tox-uv's runner; each skip is kept for the summary."""

    _package_tox_env_type = Packager.id()

    @staticmethod
    def id() -> str:
        """Name it for tox.ini."""
        return "skip-unreachable"

    def setup(self) -> None:
        """Build the environment."""
        result = _results[self.conf.name] = Result(failed=1, because="could not be set up")
        result.has_tests = REPORT in str(self.conf["commands"])
        try:
            if time.time() > float(os.environ.get("TOX_NO_START_AFTER", "inf")):
                raise Skip("its turn came after TOX_NO_START_AFTER: this machine is too slow")
            super().setup()
        except Skip as skip:
            result.failed, result.skipped, result.because = 0, 1, str(skip)
            result.left_out = True
            raise
        _share_bytecode(self)
        result.set_up = time.monotonic()


def _share_bytecode(env: ToxEnv) -> None:
    """Link the bytecode that other environments have compiled, and offer this one's to them.

    A file of bytecode belongs to the source file's inode. Python compares the source's time and
    size before it takes the bytecode, so that none which is out of date does harm.
    """
    site, pool = env.env_site_package_dir(), env.core["work_dir"] / ".bytecode"  # type: ignore[attr-defined]
    tag = f".cpython-{site.parent.name.removeprefix('python').replace('.', '')}.pyc"
    pool.mkdir(parents=True, exist_ok=True)
    known = set(os.listdir(pool))
    for folder, _, files in os.walk(site):
        if not any(name.endswith(".py") for name in files):
            continue
        for source in os.scandir(folder):
            if source.name.endswith(".py") and source.stat().st_nlink > 1:
                shared, cache = f"{source.inode()}{tag}", os.path.join(folder, "__pycache__")
                own = os.path.join(cache, source.name.removesuffix(".py") + tag)
                with contextlib.suppress(OSError):  # it is there, or nothing is compiled yet
                    if shared in known:
                        os.makedirs(cache, exist_ok=True)
                        os.link(pool / shared, own)
                    else:
                        os.link(own, pool / shared)


@impl
def tox_register_tox_env(register: ToxEnvRegister) -> None:
    """Register the runner that tox.ini asks for."""
    if UvVenvRunner is not object:
        register.add_run_env(Runner)
        register.add_package_env(Packager)


@impl
def tox_extend_envs() -> list[str]:
    """Name the environments of all labels."""
    ini = ConfigParser(interpolation=None)
    ini.read(Path(__file__).with_name("tox.ini"))
    labels = ini["tox"]["labels"].replace("\\\n", "").strip().splitlines()
    return [name for label in labels for name in extend_factors(label.partition("=")[2])]


@impl
def tox_add_env_config(env_conf: EnvConfigSet) -> None:
    """Find the pins of an environment: those that its name begins with, or a framework's newest."""
    name = re.sub("^(coverage|example)-", "", env_conf.name).replace("system-", "verl-")
    files = [file.stem for file in (Path(__file__).parent / "tests/environments").glob("*.txt")]
    named = [one for one in files if f"{name}-".startswith(f"{one}-")]
    versions = [one for one in files if re.fullmatch(rf"{name}-[\d.]+", one)]
    versions.sort(key=lambda one: [int(part) for part in re.findall(r"\d+", one)])
    pins = max([*versions[-1:], *named], key=len, default=name)
    env_conf.add_constant("pins", "the file of its pins in tests/environments", pins)


@impl
def tox_after_run_commands(tox_env: ToxEnv, exit_code: int, outcomes: list[Outcome]) -> None:
    """Count the tests of an environment."""
    result = _results[tox_env.conf.name]
    result.passed, result.failed, result.because, result.was_run = 0, 0, "", True
    result.ended = time.monotonic()
    _share_bytecode(tox_env)
    report = tox_env.env_tmp_dir / REPORT
    if report.exists():
        result.read(report)
    elif exit_code == 0:
        result.passed = 1
    if exit_code and not result.failed:
        result.failed, result.because = 1, f"a command ended with status {exit_code}"


def _summarize() -> int:
    """Print the summary, and return the status of a run in which nothing failed."""
    print()
    for name, result in _results.items():
        if result.was_run:
            print(f"{name}: {result} {result.because}".rstrip())
            print(f"    {result.times()}")
            for seconds, test in result.slowest:
                print(f"    {seconds:6.1f} s  {test}")
    results = _results.values()
    idle = {name: one for name, one in _results.items() if not one.passed + one.failed}
    for name, result in _results.items():
        if name in idle or not result.was_run:
            because = result.because or "every test was skipped"
            print(f"{'RAN NOTHING' if name in idle else 'FAILED'} {name}: {because}")
    status = 4 if any(not one.left_out for one in idle.values()) else 3 if idle else 0
    if all(name in idle for name, one in _results.items() if one.has_tests):
        status = 1 if any(one.has_tests for one in results) else status
        print("no test ran")
    total = (sum(getattr(r, count) for r in results) for count in ("passed", "failed", "skipped"))
    print(f"\n{Result(*total)}", flush=True)
    return status


def _then_summarize(handler: Callable[[State], int]) -> Callable[[State], int]:
    @wraps(handler)
    def handle(state: State) -> int:
        options, labels = state.conf.options, state.conf.core["labels"]
        if options.labels:
            names = (name for label in options.labels for name in labels[label])
            options.env, options.labels = CliEnv(",".join(names)), []
        status = handler(state)
        worth_it = any(result.has_tests or not result.was_run for result in _results.values())
        if not worth_it or options.no_test:
            return status
        proved = _summarize()
        return status or proved

    return handle


@impl
def tox_add_option(parser: ToxParser) -> None:
    """Let the commands that run environments end with the summary."""
    for name in ("run", "r", "run-parallel", "p", "legacy", "le"):
        options, handler = parser.handlers[name]
        parser.handlers[name] = options, _then_summarize(handler)
