"""Tests that every framework has to pass.

``tests/<framework>/test_contract.py`` derives a class from each class here. Each derived class adds
the framework's :class:`Driver`, and fixtures for what only that framework has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ..processes.rank_server import Ranks
from . import (
    examples_run,
    mutants,
    status_in_docs,
    stepping_places,
    symbols_in_record,
    versions_in_docs,
)
from .checkouts import Told, as_checkout, as_installed
from .in_force import disagreements
from .requested_configs import Case, each_case, expected, outcome_in
from .upstreams_own import PASSED, Own


def leave_as_it_is(root: Path, version: str) -> None:
    """Change nothing, because the copied packages state their version themselves."""


@dataclass(frozen=True)
class Driver:
    """Facts about a framework that the contract's tests need.

    Attributes:
        framework: the framework's name, as users write it.
        version: the installed version, as ``status()`` reports it.
        pinned: the version in the tox environment's name.
        worker: a test file that builds a real worker, and then calls ``status_in_docs.tell``.
        example: the module in ``examples``.
        tested: whether the installed version is one of the tested versions.
        state_version: writes the version into a checkout whose packages do not state it.
    """

    framework: str
    version: str
    pinned: str
    worker: Path
    example: str
    tested: bool = True
    state_version: Callable[[Path, str], None] = leave_as_it_is


class Contract:
    driver: ClassVar[Driver]

    @pytest.fixture
    def framework(self) -> str:
        return self.driver.framework

    @pytest.fixture
    def server(self) -> Ranks | None:
        """The server that forks a test's process; ``None`` to start a new Python."""
        return None


class Forked(Contract):
    """A worker and the example run in forks of one with the slowest imports."""

    @pytest.fixture
    def server(self, ranks: Ranks) -> Ranks:
        return ranks


class Recorded:
    """What is recorded about a release, compared with the installed version."""

    def test_the_record_of_symbols_is_current(self, framework: str) -> None:
        symbols_in_record.hold(framework)

    @pytest.mark.slow
    def test_a_wheel_of_what_is_installed_is_read_and_not_run(
        self, framework: str, tmp_path: Path
    ) -> None:
        symbols_in_record.hold_as_a_wheel(framework, tmp_path)

    def test_the_page_of_versions_is_current(self, framework: str) -> None:
        versions_in_docs.hold(framework)


class Release(Contract, Recorded):
    """The record of a release, and its checkout."""

    @pytest.fixture(scope="class")
    def installed(self) -> Told:
        """The doctor's report on the installed framework."""
        return as_installed(self.driver.framework)

    @pytest.mark.slow
    def test_a_checkout_is_the_version_that_it_states(
        self, installed: Told, tmp_path: Path
    ) -> None:
        def state(root: Path) -> None:
            self.driver.state_version(root, installed.version)

        found = as_checkout(self.driver.framework, tmp_path, state)
        assert found.version == installed.version.partition("+")[0]
        assert found.tested is installed.tested is self.driver.tested
        assert found.reason == installed.reason
        assert found.problems == installed.problems
        assert found.seams == installed.seams


class Worker(Contract):
    """In a real worker the text of ``status()`` fits one screen and equals the text in the docs."""

    @pytest.mark.slow
    def test_status_of_a_worker(
        self, server: Ranks | None, tmp_path: Path, request: pytest.FixtureRequest
    ) -> None:
        driver = self.driver
        text = status_in_docs.of_a_worker(driver.worker, tmp_path, server)
        assert f"{driver.framework} {driver.version}, tested: in force" in text
        environment = f"{driver.framework}-{driver.pinned}"
        status_in_docs.hold(text, driver.framework, environment, request)


class RequestedConfigs(Contract):
    """Each request, written into a framework's own config, gets the same plan in every framework.

    The fixture ``requested_of`` writes a case into the framework's config, and reads the requested.
    """

    @each_case
    def test_the_table(
        self, fused_adam: str, shim: Any, requested_of: Callable[[Case], Any], case: Case
    ) -> None:
        shim(settings=case.settings)
        assert outcome_in(self.driver.framework, case, requested_of(case)) == expected(case)


class Job(Contract):
    """For a job, all commands agree on what is in force, and the example trains."""

    @pytest.mark.slow
    def test_all_say_what_the_worker_says(self) -> None:
        assert disagreements(self.driver.framework) == []

    @pytest.mark.slow
    def test_the_example_trains(self, server: Ranks | None) -> None:
        said = examples_run.run(self.driver.example, self.driver.framework, server)
        assert said.count("step") >= 8


class Upstream(Contract):
    """Each change of the code that seams depend on is noticed, or does no harm."""

    def test_docs_list_every_place_that_forms_gradients_or_takes_a_step(self) -> None:
        stepping_places.hold(self.driver.framework)

    @pytest.mark.slow
    def test_changes_of_upstream_are_noticed_or_do_no_harm(self) -> None:
        mutants.hold(self.driver.framework)


class UpstreamsOwn(Contract):
    """The framework's own tests that need no GPU pass with the shim, or end as without it.

    The fixture ``own`` provides the framework's tests. Without the shim only the files run in which
    a test did not pass with it.
    """

    def test_upstreams_own_tests_have_the_same_outcome(self, own: Own) -> None:
        on = own.run(on=True)
        assert on.passed >= own.least(len(on.outcomes))
        files = {test.partition("::")[0] for test, end in on.outcomes.items() if end != PASSED}
        if files:
            own = replace(own, files=sorted(files))
            ended = {
                test: on.outcomes[test] for test in on.outcomes if test.partition("::")[0] in files
            }
            assert ended == own.run(on=False).outcomes, on.said
