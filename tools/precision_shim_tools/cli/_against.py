"""``precision-shim doctor --against PATH``: check a framework before installing it.

The doctor reads a wheel or a folder instead of the installed packages, and applies the same checks.
It imports and executes no code of the wheel or folder.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from precision_shim.errors import PrecisionShimError, SourceError
from precision_shim.process import registry as _registry
from precision_shim.process import settings as _settings
from precision_shim.process import standby
from precision_shim.process import symbols as _symbols
from precision_shim.process import versions as _installed
from precision_shim.process.framework import Adapter
from precision_shim.reporting import text as _status_text
from precision_shim.reporting.record import FrameworkStatus, SeamStatus
from precision_shim.reporting.text import fold
from precision_shim.seams._source import looking_at
from precision_shim_adapters.agreement.engine_names import RELIED_ON

from ..upstream.framework_status import as_dict, predict_status
from ..upstream.trees import Tree, open_tree, over
from . import fail
from ._output import show, write

__all__ = ["command", "options", "report"]


def options(parser: argparse.ArgumentParser) -> None:
    """Add ``--against`` and ``--framework`` to the doctor's parser."""
    parser.add_argument(
        "--against",
        metavar="PATH",
        help="judge a wheel, a checkout, a source folder or a site-packages instead of what is "
        "installed; nothing of it is imported (exit status 2: it holds no framework and no vLLM or "
        "SGLang)",
    )
    parser.add_argument("--framework", metavar="NAME", help="with --against: the only one to judge")


def command(asked: argparse.Namespace) -> Callable[[argparse.Namespace], int] | None:
    """Return the function to run in place of the usual report; ``None`` for the usual report."""
    if asked.framework is not None and asked.against is None:
        asked.parser.error("--framework needs --against PATH")
    return None if asked.against is None else _against


@dataclass(frozen=True)
class Report:
    """The result of checking a wheel or folder for one framework.

    Attributes:
        framework: the framework's name.
        status: the status that the framework would have with the packages in the wheel or folder.
        holds: maps each distribution that was read in the wheel or folder to its version.
        installed: maps each distribution that was read where it is installed to its version.
        lost: the (feature, training engine) pairs that only the installed packages support.
        won: the (feature, training engine) pairs that only the checked packages support.
        problems: sentences on the seams that could not be applied, with the reasons.
    """

    framework: str
    status: FrameworkStatus
    holds: Mapping[str, str]
    installed: Mapping[str, str]
    lost: list[dict[str, str]]
    won: list[dict[str, str]]
    problems: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as dicts, lists, strings and numbers, for JSON."""
        told = asdict(self)
        del told["status"]
        return {**told, **as_dict(self.status), "ok": not self.problems}


def _find_moves(before: FrameworkStatus, after: FrameworkStatus) -> list[dict[str, str]]:
    left, at_work = _status_text.verdicts(after.seams), _status_text.AT_WORK
    return [
        {"feature": feature, "path": path, "because": _because(after.seams, feature, path)}
        for (feature, path), verdict in _status_text.verdicts(before.seams).items()
        if verdict in at_work and left.get((feature, path)) not in at_work
    ]


def report(path: Path, framework: str | None = None) -> list[Report]:
    """Check a wheel, a checkout, a folder with packages, or a site-packages folder.

    Returns:
        A report for each framework (or only ``framework``) whose packages or backend it contains.

    Raises:
        SourceError: the path contains no framework or backend, or cannot be read.
        SettingsError: a variable has an invalid value.
    """
    known = _registry.entries()
    if framework is not None and framework not in known:
        raise SourceError(f"no framework {framework!r}; allowed: {', '.join(known)}.")
    unnamed = [framework for framework in known.values() if not framework.by_name]
    asked = [known[framework]] if framework is not None else unnamed
    packages = [package for entry in asked for package in entry.packages]
    tree = open_tree(path, (*packages, *_registry.shared()))
    held = [entry for entry in asked if any(tree.has(name) for name in entry.packages)]
    if not held:  # ``path`` has only a backend: check ``framework``, or all installed frameworks
        held = [
            entry
            for entry in asked
            if framework is not None
            or _installed.version_of(entry.distribution, entry.packages) is not None
        ]
    judged = [choice for entry in held if (choice := _judge(entry, tree)).holds]
    if not judged:
        inside = ", ".join(package for package in _registry.shared() if tree.has(package))
        raise SourceError(
            f"{path} holds {inside} and no framework, and none that builds on it is installed "
            f"here. Looked for: {', '.join(packages)}. Name one with --framework."
        )
    return judged


def _judge(entry: Adapter, tree: Tree) -> Report:
    name = entry.framework
    settings = _settings.resolve(frameworks=(name,), known_frameworks=_registry.entries())
    versions = _versions(tree)
    # Load the adapter within looking_at(), because an adapter may read source while it is loaded.
    with looking_at(over(tree)):
        there, problems = predict_status(entry, settings, versions)
        if there.version is None:  # ``path`` has only a backend, such as Megatron-core
            problems = []
        targets = _symbols.targets_by_distribution(_registry.load(entry))
    lost, won = [], []
    if _installed.version_of(entry.distribution, entry.packages) is not None:
        here, _ = predict_status(entry, settings, _installed.version_of)
        lost, won = _find_moves(here, there), _find_moves(there, here)
    packages = {name: (package,) for package, name in _registry.shared().items()}
    holds: dict[str, str] = {}
    installed: dict[str, str] = {}
    for distribution in targets:
        beneath = packages.get(distribution, entry.packages)
        version = versions(distribution, beneath)
        if version is not None:
            (holds if any(map(tree.has, beneath)) else installed)[distribution] = version
    return Report(name, there, holds, installed, lost, won, problems)


def _versions(tree: Tree) -> _installed.Versions:
    def version_of(distribution: str, packages: Iterable[str]) -> str | None:
        named = list(packages)
        for package in named:
            if tree.has(package):
                return tree.version_of(distribution, package)
        return None if tree.complete else _installed.version_of(distribution, named)

    return version_of


def _because(seams: Iterable[SeamStatus], feature: str, path: str) -> str:
    seams_there = [seam for seam in seams if (seam.feature, seam.path) == (feature, path)]
    # Prefer refused seams, because seams in the state ``native`` or ``absent`` have reasons, too.
    refused = [there for there in seams_there if there.state == "refused"]
    reasons = [there.reason for there in refused or seams_there]
    own = [reason for reason in reasons if reason and not reason.startswith("refused whole")]
    return next(iter([*own, *filter(None, reasons)]), "this version has nothing of it")


def _engines(path: Path) -> Iterable[dict[str, Any]]:
    """Read which of the names that the shim relies on each rollout engine in ``path`` has."""
    tree = open_tree(path, tuple(RELIED_ON))
    for engine in filter(tree.has, RELIED_ON):
        found: dict[str, list[str]] = {"has": [], "lacks": []}
        for places in RELIED_ON[engine]:
            modules, names = (words.split() for words in places.split(": "))
            readers = filter(None, map(tree.find, modules))
            words = set(re.findall(r"\w+", " ".join(read() or "" for read in readers)))
            for name in names:
                found["has" if name in words else "lacks"].append(f"{modules[0]}: {name}")
        yield {"engine": engine, "version": tree.version_of(engine, engine), **found}


def _show_engines(path: Path, *, as_json: bool) -> int:
    lacks = False
    for one in _engines(path):
        lacks |= bool(one["lacks"])
        lines = [f"{path.name}: the rollout engine {one['engine']} {one['version']}"]
        lines += [f"  {state:<6} {name}" for state in ("has", "lacks") for name in one[state]]
        write(json.dumps(one, indent=2)) if as_json else show("\n".join(lines))
    return int(lacks)


def _against(asked: argparse.Namespace) -> int:
    standby.stop()
    path = Path(asked.against)
    try:
        reports = report(path, asked.framework)
    except SourceError as error:
        try:
            return _show_engines(path, as_json=asked.as_json)
        except SourceError:
            return fail(asked, str(error))
    except (PrecisionShimError, OSError) as error:
        return fail(asked, str(error))
    if asked.as_json:
        told = [verdict.to_dict() for verdict in reports]
        write(json.dumps(told if len(told) > 1 else told[0], indent=2))
    else:
        show("\n\n".join(_text(verdict, path) for verdict in reports))
    return 1 if any(verdict.problems for verdict in reports) else 0


def _text(report: Report, path: Path) -> str:
    lines = fold(f"{path.name}, for {report.framework}", 0, 2)
    for name, version in report.holds.items():
        lines += fold(f"{name} {version}, read in {path.name}", 2, 4)
    for name, version in report.installed.items():
        lines += fold(f"{name} {version}, read where it is installed", 2, 4)
    features = list(dict.fromkeys(seam.feature for seam in report.status.seams))
    lines += ["", *_status_text.framework(report.framework, report.status, features, ahead=True)]
    for title, moved in (
        ("what the user would lose", report.lost),
        ("what the user would gain", report.won),
    ):
        lines += ["", title] if moved else []
        for each in moved:
            where = f" ({each['path']})" if each["path"] else ""
            because = f": {each['because']}" if title.endswith("lose") else ""
            lines += fold(f"{each['feature']}{where}{because}", 2, 4)
    told = _status_text.refusals(f"{report.framework} {report.status.version}", report.status.seams)
    if report.problems:
        lines += ["", "problems"]
        for text in told or report.problems:
            lines += fold(text, 2, 4)
    else:
        lines += ["", "no problems"]
    return "\n".join(lines)
