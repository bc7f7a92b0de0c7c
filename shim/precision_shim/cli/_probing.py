"""``precision-shim doctor --probe``: test whether assumptions about frameworks still hold.

The framework is imported in a child process, in which the shim is off.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from ..process import registry as _registry
from ..process import standby
from ..process import versions as _versions
from ..process.settings import PREFIX
from ..reporting.text import fold
from ..upstream.probes import probes_in, run
from ._output import show, write

__all__ = ["answer", "ask", "probing"]

_WORDS = {
    "holds": "hold",
    "fails": "no longer hold",
    "absent": "concern what is not installed",
    "unasked": "could not be asked",
}
_PATIENCE = 300  # timeout in seconds for a framework's imports and all probes
_HERE = "import sys; from precision_shim.cli._probing import answer; answer(sys.argv[1:])"


def answer(modules: Iterable[str]) -> None:
    """Run the probes that the given modules define, and print the outcomes as JSON."""
    standby.stop()
    output, sys.stdout = sys.stdout, sys.stderr  # frameworks print while they are imported
    outcomes = [asdict(run(probe)) for module in modules for probe in probes_in(module)]
    sys.stdout = output
    print(json.dumps(outcomes))


def ask(modules: Iterable[str]) -> list[dict[str, Any]]:
    """Run the probes that the given modules define, in a child process.

    Raises:
        RuntimeError: the process ended without a result; the message has stderr's last lines.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _HERE, *modules],
        env={**os.environ, PREFIX: "0"},
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
        check=False,
    )
    try:
        outcomes: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = " / ".join(done.stderr.strip().splitlines()[-3:])
        raise RuntimeError(f"the probes ended with {done.returncode}: {last}") from None
    return outcomes


def probing(asked: argparse.Namespace) -> int:
    """Run all probes and print the outcomes; return 1 if an assumption no longer holds."""
    standby.stop()
    told: dict[str, dict[str, Any]] = {}
    for name, entry in _registry.entries().items():
        version = _versions.version_of(entry.distribution, entry.packages)
        named = asked.framework == name
        if version is None or not (named or (asked.framework is None and not entry.by_name)):
            continue
        modules = _registry.load(entry).probes
        try:
            if modules:
                told[name] = {"version": version, "probes": ask(modules)}
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"precision-shim doctor: {name} {version}: {error}", file=sys.stderr)
            return 2
    if not told:
        print("precision-shim doctor: no framework to probe is installed here", file=sys.stderr)
        return 2
    failed = any(probe["state"] == "fails" for each in told.values() for probe in each["probes"])
    if asked.as_json:
        write(json.dumps({"frameworks": told, "ok": not failed}, indent=2))
    else:
        show("\n".join(line for name, result in told.items() for line in _text(name, result)))
    return 1 if failed else 0


def _text(name: str, told: dict[str, Any]) -> Iterable[str]:
    outcomes = told["probes"]
    failed = [outcome for outcome in outcomes if outcome["state"] == "fails"]
    counts = Counter(outcome["state"] for outcome in outcomes)
    summary = [f"{counts[word]} {text}" for word, text in _WORDS.items() if counts[word]]
    yield f"{name} {told['version']}, {len(outcomes)} assumptions: {', '.join(summary)}"
    for outcome in outcomes:
        yield from fold(f"{outcome['state']:<8} {outcome['name']}", 2, 11)
        if outcome["state"] != "holds":
            yield from fold(outcome["found"] if outcome not in failed else "", 11)
        if outcome in failed:
            yield from fold(f"assumed: {outcome['assumes']} ({outcome['assumed']})", 11, 13)
            yield from fold(f"found: {outcome['found']}", 11, 13)
            yield from fold(f"rests on it: {outcome['rule']}", 11, 13)
