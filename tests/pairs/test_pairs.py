"""Random pairs of jobs that save and resume: none may continue with other numbers silently.

Each pair runs the real framework in its own processes, and is compared with a training without a
stop; ``ends.py`` has the closed list of allowed ends. A failure prints the pair as one line. To run
that pair again::

    tox run -e verl-0.9.1 -- tests/pairs --pair "LINE"

To draw other pairs: ``--drawn SEED:COUNT``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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
OLDEST, NEWEST = 12, 60
"""The numbers of pairs that run on the oldest version and the newest, and further ones on the
newest alone."""

KNOWN = {
    "fp32-parameters-precision-aware": (
        "backend=megatron sharding=dp_reshardable "
        "| dtype=fp32 aware=yes | dtype=fp32 aware=yes seed=1"
    ),
    "fp32-norms-precision-aware": (
        "backend=megatron sharding=dp_reshardable "
        "| dtype=mixed aware=yes | dtype=mixed aware=yes seed=1"
    ),
    "saved-again-without-the-shim": (
        "overflows=2 | dtype=fp16 init=1024 | dtype=fp16 shim=off seed=1 | dtype=fp16 seed=2"
    ),
    "saved-again-in-bf16": (
        "overflows=2 | dtype=fp16 init=1024 | dtype=bf16 seed=1 | dtype=fp16 seed=2"
    ),
    **{
        f"killed-at-{kill}": (
            f"overflows=2 kill={kill} "
            "| dtype=fp16 init=1024 | dtype=fp16 init=2 interval=2 seed=1 | dtype=fp16 seed=2"
        )
        for kill in range(1, 13)
    },
    **{
        f"config-by-{how}": (
            f"backend=megatron sharding=dp_reshardable | policy=follow-model copied={how} "
            "| shim=off seed=1"
        )
        for how in ("replace", "pickle", "deepcopy")
    },
    "first-scale-below-one": "| dtype=fp16 init=0.25 | dtype=fp16 seed=1",
    **{
        f"without-transformer-engine-{sharding}": (
            f"backend=megatron engine=none sharding={sharding} | - | seed=1"
        )
        for sharding in ("fully_reshardable", "dp_zero_gather_scatter")
    },
}
"""Pairs that continued with other numbers, or failed silently, in a version of this project."""


ENDS = {
    "saved-again-without-the-shim": "told",
    "saved-again-in-bf16": "told",
    "without-transformer-engine-fully_reshardable": "refused",
    "without-transformer-engine-dp_zero_gather_scatter": "refused",
}
"""The ends of the known pairs that do not end exact."""


def drawn(seed: int, count: int, first: int = 0) -> list[pytest.param]:
    """Pairs of a seed, by consecutive numbers."""
    return [
        pytest.param(str(draw(seed, number)), id=f"{seed}-{number}")
        for number in range(first, first + count)
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Use the pairs of the command line, if any, instead of the tests' own pairs."""
    if metafunc.function is not test_drawn:
        return
    given, asked = (metafunc.config.getoption(name, None) for name in ("--pair", "--drawn"))
    if given:
        pairs = [pytest.param(text, id=f"given-{i}") for i, text in enumerate(given)]
    elif asked:
        seed, _, count = asked.partition(":")
        pairs = drawn(int(seed), int(count or NEWEST))
    else:
        pairs = [_oldest(one) for one in drawn(SEED, OLDEST)] + drawn(SEED, NEWEST, first=OLDEST)
    metafunc.parametrize("text", pairs)


def _oldest(one: pytest.param) -> pytest.param:
    return pytest.param(*one.values, id=one.id, marks=pytest.mark.oldest)


def hold(
    text: str,
    launch: Callable[[str], Ranks],
    folder: Path,
    node: pytest.Item,
    allowed: tuple[str, ...] = (),
) -> None:
    """Run a pair; fails unless its end is an allowed one."""
    pair = parse(text)
    if pair.backend == "fsdp" and Version("0.8") > VERL:
        pytest.skip("0.7.1's FSDP engine has no scaler; its own tests have it")
    end = end_of(pair, launch, folder)
    # record_property does the same, but warns of the report's format.
    node.user_properties.append(("end", f"{pair.backend}: {end.kind}"))
    node.user_properties.append(("pair", f"{end.kind}: {pair}\n    {end.why}"))
    if not (end.kind in allowed if allowed else end.allowed):
        pytest.fail(f'{end.kind}: {end.why}\nTo run it again: --pair "{pair}"', pytrace=False)


NEWEST_ONLY = {
    "config-by-deepcopy",
    "saved-again-without-the-shim",
    *(f"killed-at-{kill}" for kill in range(1, 13) if kill != 4),
}
"""The known pairs that are similar to other known pairs."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=[pytest.mark.oldest] * (one not in NEWEST_ONLY)) for one in KNOWN],
)
def test_known(
    name: str, launch: Callable[[str], Ranks], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Runs the pairs in ``KNOWN``, each of which once failed."""
    ends = (ENDS.get(name, "exact"),)
    if name.startswith("killed"):
        ends = ("exact", "told", "killed", "as unpatched")
    hold(KNOWN[name], launch, tmp_path, request.node, ends)


def test_drawn(
    text: str, launch: Callable[[str], Ranks], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Runs drawn pairs, or those of the command line."""
    hold(text, launch, tmp_path, request.node)
