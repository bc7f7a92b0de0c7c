"""Probes run a framework to test a rule's assumptions about the framework's behaviour.

A comparison of names finds a removed symbol, but not a removed assertion whose identifiers are
still elsewhere in the source. A probe is a small function that runs the framework's code, on a
CPU and in a short time, and reports the framework's behaviour.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from ..errors import SeamError


class Answer(NamedTuple):
    """A probe's result; the assumption is true only if ``assumed`` and ``found`` are equal.

    Attributes:
        assumed: the value that the rule assumes.
        found: the framework's value.
    """

    assumed: Any
    found: Any


@dataclass(frozen=True)
class Probe:
    """One assumption of a rule, and the function that tests it.

    Attributes:
        name: the probe's name in the output of ``precision-shim doctor``.
        assumes: the assumption, as a sentence.
        rule: the rule that relies on the assumption, as ``"module:name"``.
        needs: modules that the probe imports; if one of them is missing, the probe does not run.
        ask: the test function; an error in the test function means that the assumption is false.
    """

    name: str
    assumes: str
    rule: str
    needs: tuple[str, ...]
    ask: Callable[[], Answer]


@dataclass(frozen=True)
class Outcome:
    """The result of running a probe.

    Attributes:
        state: one of ``holds``, ``fails``, ``absent`` (a needed module is not installed) and
            ``unasked`` (a needed module is installed but cannot be imported).
        assumes: the probe's assumption, as a sentence.
        assumed: the value that the rule assumes, as text.
        found: the framework's value, as text, or the reason why the probe did not run.
        seconds: duration of the probe, without imports.
    """

    name: str
    state: str
    assumes: str
    rule: str
    assumed: str = ""
    found: str = ""
    seconds: float = 0.0


_MARK = "_precision_shim_probe"
_Ask = TypeVar("_Ask", bound=Callable[[], Answer])


def probe(
    name: str, *, assumes: str, rule: str, needs: Iterable[str] = ()
) -> Callable[[_Ask], _Ask]:
    """Declare that a function tests an assumption; see ``Probe``."""

    def declare(function: _Ask) -> _Ask:
        made = Probe(name, assumes, rule, tuple(needs), function)
        setattr(function, _MARK, made)
        return function

    return declare


def probes_in(module: str) -> tuple[Probe, ...]:
    """Return the probes that a module declares, in the order of their definition.

    Raises:
        SeamError: the module declares no probe.
    """
    probes = [
        getattr(function, _MARK)
        for function in vars(importlib.import_module(module)).values()
        if callable(function) and hasattr(function, _MARK)
    ]
    if not probes:
        raise SeamError(f"{module} declares no probe: no function has a probe(...).")
    return tuple(probes)


def run(one: Probe) -> Outcome:
    """Run a probe; if the probe raises an exception, the outcome has the state ``fails``."""
    from ..seams._source import find_spec

    told = one.name, one.assumes, one.rule
    for module in one.needs:
        if find_spec(module.partition(".")[0]) is None or find_spec(module) is None:
            return _outcome(told, "absent", found=f"{module} is not installed")
        try:
            importlib.import_module(module)
        except Exception as error:
            return _outcome(told, "unasked", found=f"{module} cannot be imported: {error!r}")
    begin = time.perf_counter()
    try:
        answer = one.ask()
    except Exception as error:
        taken = time.perf_counter() - begin
        return _outcome(told, "fails", "an answer", f"{type(error).__name__}: {error}", taken)
    taken = time.perf_counter() - begin
    state = "holds" if answer.assumed == answer.found else "fails"
    return _outcome(told, state, str(answer.assumed), str(answer.found), taken)


def _outcome(
    told: tuple[str, str, str], state: str, assumed: str = "", found: str = "", taken: float = 0.0
) -> Outcome:
    name, assumes, rule = told
    return Outcome(name, state, assumes, rule, assumed, found, round(taken, 3))
