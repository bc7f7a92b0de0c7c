"""Whether a feature is in force: all parts of the shim give the same answer as the worker."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import precision_shim
from precision_shim.process import session as _session
from precision_shim.process.registry import entries, load
from precision_shim_tools.checkpoint.prediction import Here
from precision_shim_tools.plan.command import Job
from precision_shim_tools.predicted import predict_status

Pair = tuple[str, str]
"""A feature, and the name of a group of its seams."""


@contextlib.contextmanager
def refused(framework: str, feature: str, group: str) -> Iterator[None]:
    """Replace a framework's table of seams by one with a group of seams that cannot be patched."""
    place, _, name = entries(third_party=False)[framework].place.partition(":")
    module = importlib.import_module(place)
    whole = getattr(module, name)
    broken = tuple(
        replace(one, relies_on=("no_such_name",))
        if (one.feature, one.group) == (feature, group) and one.wrapper is not None
        else one
        for one in whole
    )
    setattr(module, name, broken)
    try:
        yield
    finally:
        setattr(module, name, whole)


def answers(framework: str, pairs: Iterable[Pair]) -> list[dict[str, bool]]:
    """What worker, doctor, plan and checkpoint doctor answer if the shim is to be on."""
    precision_shim.install(export=False)
    try:
        settings = _session.current_settings()
        in_worker = {pair: _session.in_force(framework, *pair) for pair in pairs}
    finally:
        precision_shim.uninstall()
    found, _ = predict_status(entries()[framework], settings)
    broken = {
        (one.feature, one.group)
        for one in found.seams
        if one.state == "refused" and not one.refusal
    }
    job, here = Job(framework, "", None, (), (), settings), Here(True, settings)
    return [
        {
            "worker": worker,
            "doctor": found.state != "off" and pair not in broken,
            "plan": job.in_force(*pair),
            "checkpoint": here.in_force(framework, *pair),
        }
        for pair, worker in in_worker.items()
    ]


def disagreements(framework: str) -> list[Any]:
    """Answers that differ from the worker's, if each group of seams is refused in turn."""
    adapter = load(entries(third_party=False)[framework])
    importlib.import_module(adapter.packages[0])  # which wakes the adapter
    _import_a_target(adapter.seams)
    pairs = sorted({(one.feature, one.group) for one in adapter.seams if one.wrapper is not None})
    found: list[Any] = []
    seen = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for pair in pairs:
            with refused(framework, *pair):
                told = answers(framework, (pair, pairs[0], pairs[-1]))
            seen |= {said["worker"] for said in told}
            found += [(pair, said) for said in told if len({*said.values()}) > 1]
    assert seen == {True, False}
    return found


def _import_a_target(seams: Iterable[Any]) -> None:
    """Import one module that a seam patches, so that a worker's engine inspects the framework."""
    for module in dict.fromkeys(one.module for one in seams if one.wrapper is not None):
        with contextlib.suppress(Exception):  # packages may be missing here
            importlib.import_module(module)
            return
    raise AssertionError("no module of a seam can be imported here")
