"""Random pairs of jobs that save and resume: none may continue with other numbers silently.

Each pair runs the real framework in its own processes, and is compared with a training without a
stop; ``ends.py`` has the closed list of allowed ends. A failure prints the pair as one line. To run
that pair again::

    tox run -e verl-0.9.1 -- tests/pairs --pair "LINE"

To draw other pairs: ``--drawn SEED:COUNT``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from ..processes.rank_server import Ranks
from .conftest import VERL
from .drawing import draw, parse
from .ends import end_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        Version("0.7") > VERL, reason="verl 0.6's environment is for the untested version"
    ),
]

SEED = 22
NUMBERS = (0, 1, 2, 5, 8, 11, 16, 21, 24, 26, 32, 35, 40, 41, 44, 50, 55, 57, 58, 63, 64)
"""The numbers of the pairs that run. They differ in what of the shim acts: without float16 nothing
acts on FSDP."""

KNOWN = {
    "fp32-parameters-precision-aware": (
        "backend=megatron sharding=dp_reshardable "
        "| dtype=fp32 aware=yes | dtype=fp32 aware=yes seed=1"
    ),
    "fp32-norms-precision-aware": (
        "backend=megatron sharding=dp_reshardable "
        "| dtype=mixed aware=yes | dtype=mixed aware=yes seed=1"
    ),
    "config-by-pickle": (
        "backend=megatron sharding=dp_reshardable | policy=follow-model copied=pickle "
        "| shim=off seed=1"
    ),
    "first-scale-below-one": "| dtype=fp16 init=0.25 | dtype=fp16 seed=1",
    "without-transformer-engine": (
        "backend=megatron engine=none sharding=fully_reshardable | - | seed=1"
    ),
}
"""Pairs that continued with other numbers, or failed silently, in a version of this project."""


def drawn(seed: int, numbers: Iterable[int]) -> list[Any]:
    """Pairs of a seed."""
    return [pytest.param(str(draw(seed, number)), id=f"{seed}-{number}") for number in numbers]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Use the pairs of the command line, if any, instead of the tests' own pairs."""
    if metafunc.function is not test_drawn:
        return
    given, asked = (metafunc.config.getoption(name, None) for name in ("--pair", "--drawn"))
    if given:
        pairs = [pytest.param(text, id=f"given-{i}") for i, text in enumerate(given)]
    elif asked:
        seed, _, count = asked.partition(":")
        pairs = drawn(int(seed), range(int(count)))
    else:
        pairs = drawn(SEED, NUMBERS)
    metafunc.parametrize("text", pairs)


def hold(
    text: str, launch: Callable[[str], Ranks], folder: Path, node: pytest.Item, wanted: str = ""
) -> None:
    """Run a pair; fails unless its end is an allowed one."""
    pair = parse(text)
    if pair.backend == "fsdp" and Version("0.8") > VERL:
        pytest.skip("0.7.1's FSDP engine has no scaler; its own tests have it")
    end = end_of(pair, launch, folder)
    # record_property does the same, but warns of the report's format.
    node.user_properties.append(("pair", f"{end.kind}: {pair}\n    {end.why}"))
    if end.kind == "wrong" or wanted not in ("", end.kind):
        pytest.fail(f'{end.kind}: {end.why}\nTo run it again: --pair "{pair}"', pytrace=False)


@pytest.mark.oldest
@pytest.mark.parametrize("name", KNOWN)
def test_known(
    name: str, launch: Callable[[str], Ranks], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Runs the pairs in ``KNOWN``, each of which once failed."""
    end = "refused" if name.startswith("without") else "exact"
    hold(KNOWN[name], launch, tmp_path, request.node, end)


def test_drawn(
    text: str, launch: Callable[[str], Ranks], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Runs drawn pairs, or those of the command line."""
    hold(text, launch, tmp_path, request.node)
