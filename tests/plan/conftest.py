"""Fixtures for the tests of the plan."""

from __future__ import annotations

from ..processes.rank_server import serving

run_ranks = serving("tests.plan.ranks")
