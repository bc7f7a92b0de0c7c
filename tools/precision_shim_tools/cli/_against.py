"""``precision-shim doctor``: check a framework before installing it, or record digests of code.

With ``--against PATH`` the doctor reads a wheel or a folder instead of the installed packages, and
applies the same checks. The doctor imports and executes no code of the wheel or folder.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from precision_shim.errors import PrecisionShimError, SourceError
from precision_shim.process import registry as _registry
from precision_shim.process import settings as _settings
from precision_shim.process import standby
from precision_shim.process import symbols as _symbols
from precision_shim.process import versions as _installed
from precision_shim.process.digest import digest, digest_of
from precision_shim.process.framework import Adapter
from precision_shim.reporting import text as _status_text
from precision_shim.reporting.record import FrameworkStatus, SeamStatus
from precision_shim.reporting.text import fold
from precision_shim.seams import look
from precision_shim.seams._source import Definition, definition, looking_at
from precision_shim_adapters.agreement.engine_names import RELIED_ON

from ..upstream import record as _recording
from ..upstream.changes import changed_lines
from ..upstream.framework_status import as_dict, predict_status
from ..upstream.trees import Tree, open_tree, over
from . import fail
from ._output import show, write

__all__ = ["command", "options", "report"]


def options(parser: argparse.ArgumentParser) -> None:
    """Add ``--against``, ``--framework`` and ``--record`` to the doctor's parser."""
    parser.add_argument(
        "--against",
        metavar="PATH",
        help="judge a wheel, a checkout, a source folder or a site-packages instead of what is "
        "installed; nothing of it is imported (exit status 2: it holds no framework and no vLLM or "
        "SGLang)",
    )
    parser.add_argument("--framework", metavar="NAME", help="with --against: the only one to judge")
    parser.add_argument(
        "--record",
        metavar="FILE",
        help="add the digests of what is installed to a file of symbols, and do nothing else",
    )


def command(asked: argparse.Namespace) -> Callable[[argparse.Namespace], int] | None:
    """Return the function to run in place of the usual report; ``None`` for the usual report."""
    if asked.framework is not None and asked.against is None:
        asked.parser.error("--framework needs --against PATH")
    if asked.against is not None and asked.record is not None:
        asked.parser.error("--against and --record exclude each other")
    if asked.against is not None:
        return _against
    return _record if asked.record is not None else None


def _record(asked: argparse.Namespace) -> int:
    standby.stop()
    file = Path(asked.record)
    try:
        record = _symbols.read_symbols(file)
    except (OSError, ValueError) as error:
        return fail(asked, f"{file} cannot be read: {error}. Name a new file, or repair it.")
    added: dict[str, int] = {}
    for entry in _registry.entries(third_party=False).values():
        if _installed.version_of(entry.distribution, entry.packages) is not None:
            for name, version, digests in installed_digests(_registry.load(entry)):
                _recording.add(record, name, version, digests)
                added[f"{name} {version}"] = sum(map(bool, digests.values()))
    if not added:
        return fail(asked, "nothing to record: no framework is installed here")
    try:
        _recording.write(record, file)
    except OSError as error:
        return fail(asked, f"{file} cannot be written: {error}. Name a file that may be written.")
    told = ", ".join(f"{name}: {count} symbols" for name, count in added.items())
    show("\n".join(fold(f"{file}: {told}", 0, 2)))
    return 0


def installed_digests(adapter: Adapter) -> Iterable[tuple[str, str, dict[str, str]]]:
    """Yield name, version and digests of each patched distribution whose version is known."""
    packages = {name: (package,) for package, name in _registry.shared().items()}
    for name, targets in _symbols.targets_by_distribution(adapter).items():
        version = _installed.version_of(name, packages.get(name, adapter.packages))
        if version not in (None, "unknown"):
            yield name, str(version), {target: digest(target) for target in targets}


@dataclass(frozen=True)
class SymbolChange:
    """A symbol in the checked wheel or folder, compared with the installed or recorded symbol.

    Attributes:
        target: ``"module:attribute"``.
        state: ``same``, ``changed``, ``gone`` or ``new``.
        as_in: the recorded versions in which the symbol has the same code.
        gained: function parameters that only the checked version has.
        lost: function parameters that the checked version lacks.
        lines: the removed and added lines of code.
    """

    target: str
    state: str
    as_in: list[str]
    gained: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """The result of checking a wheel or folder for one framework.

    Attributes:
        framework: the framework's name.
        status: the status that the framework would have with the packages in the wheel or folder.
        holds: maps each distribution in the wheel or folder to its version.
        against: maps each distribution to the version used for the comparison, as text.
        symbols: the compared symbols, including symbols that are missing in the wheel or folder.
        lost: the (feature, training engine) pairs that only the installed packages support.
        won: the (feature, training engine) pairs that only the checked packages support.
        problems: sentences on the seams that could not be applied, with the reasons.
    """

    framework: str
    status: FrameworkStatus
    holds: Mapping[str, str]
    against: Mapping[str, str]
    symbols: list[SymbolChange]
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
        owned = {
            distribution: {
                target: _sight(target)
                for target in targets
                if tree.complete or tree.owns(target.split(":")[0])
            }
            for distribution, targets in _targets(_registry.load(entry)).items()
        }
    lost, won = [], []
    if _installed.version_of(entry.distribution, entry.packages) is not None:
        here, _ = predict_status(entry, settings, _installed.version_of)
        lost, won = _find_moves(here, there), _find_moves(there, here)
    holds, against = {}, {}
    symbols: list[SymbolChange] = []
    for distribution, new in owned.items():
        package = _package(distribution, entry)
        if not new or not tree.has(package):
            continue
        holds[distribution] = versions(distribution, (package,)) or "unknown"
        old = {target: _sight(target) for target in new}
        installed = _installed.version_of(distribution, (package,))
        if installed is not None:
            basis = {t: digest_of(seen.found.node) for t, seen in old.items() if seen.found}
            against[distribution] = f"{installed}, installed here"
        else:
            newest = (_symbols.versions_of(_symbols.shipped(), distribution) or [""])[-1]
            basis = _symbols.digests_of(_symbols.shipped(), distribution, newest)
            against[distribution] = f"{newest}, as recorded" if newest else "nothing"
        for target, seen in new.items():
            change = _change(distribution, target, basis.get(target, ""), old[target], seen)
            symbols += [change] if change else []
    return Report(name, there, holds, against, symbols, lost, won, problems)


def _targets(adapter: Adapter) -> dict[str, list[str]]:
    """Return the symbols that an adapter patches, or that the framework's newest record lists."""
    targets = _symbols.targets_by_distribution(adapter)
    record, own = _symbols.shipped(), adapter.distribution
    newest = _symbols.versions_of(record, own)[-1:]
    recorded = [
        target for version in newest for target in _symbols.digests_of(record, own, version)
    ]
    targets[own] = list(dict.fromkeys([*targets.get(own, ()), *recorded]))
    return targets


@dataclass(frozen=True)
class _Sight:
    parameters: tuple[str, ...]
    found: Definition | None


def _sight(target: str) -> _Sight:
    return _Sight(look(target).parameters, definition(target))


def _change(
    distribution: str, target: str, basis: str, old: _Sight, new: _Sight
) -> SymbolChange | None:
    """Compare ``new`` with the old symbol's digest, ``basis``; ``None`` if both are missing."""
    if new.found is None:
        return SymbolChange(target, "gone", []) if basis else None
    there = digest_of(new.found.node)
    as_in = _symbols.shipped().get(distribution, {}).get(target, {}).get(there, [])
    if not basis or basis == there or old.found is None:
        state = "new" if not basis else "same" if basis == there else "changed"
        return SymbolChange(target, state, as_in)
    return SymbolChange(
        target,
        "changed",
        as_in,
        gained=[parameter for parameter in new.parameters if parameter not in old.parameters],
        lost=[parameter for parameter in old.parameters if parameter not in new.parameters],
        lines=changed_lines(old.found, new.found),
    )


def _versions(tree: Tree) -> _installed.Versions:
    def version_of(distribution: str, packages: Iterable[str]) -> str | None:
        named = list(packages)
        for package in named:
            if tree.has(package):
                return tree.version_of(distribution, package)
        return None if tree.complete else _installed.version_of(distribution, named)

    return version_of


def _package(distribution: str, entry: Adapter) -> str:
    beneath = {name: package for package, name in _registry.shared().items()}
    return beneath.get(distribution, entry.packages[0])


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
        show("\n\n".join(_text(verdict, path, verbose=asked.verbose) for verdict in reports))
    return 1 if any(verdict.problems for verdict in reports) else 0


def _text(report: Report, path: Path, *, verbose: bool) -> str:
    lines = fold(f"{path.name}, for {report.framework}", 0, 2)
    for name, version in report.holds.items():
        lines += fold(f"{name} {version}, against {report.against[name]}", 2, 4)
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
    lines += ["", *_symbols_text(report.symbols, verbose)]
    told = _status_text.refusals(f"{report.framework} {report.status.version}", report.status.seams)
    if report.problems:
        lines += ["", "problems"]
        for text in told or report.problems:
            lines += fold(text, 2, 4)
    else:
        lines += ["", "no problems"]
    return "\n".join(lines)


def _symbols_text(symbols: list[SymbolChange], verbose: bool) -> Iterable[str]:
    states = ("changed", "gone", "new", "same")
    counts = [f"{sum(symbol.state == state for symbol in symbols)} {state}" for state in states]
    yield f"{len(symbols)} symbol{'' if len(symbols) == 1 else 's'}: {', '.join(counts)}"
    for state in states if verbose else states[:3]:
        for symbol in symbols:
            if symbol.state != state:
                continue
            yield from fold(f"{state:<8} {symbol.target}", 2, 4)
            told = [
                f"{title}{', '.join(names)}"
                for title, names in (
                    ("as in ", symbol.as_in),
                    ("parameters gained: ", symbol.gained),
                    ("parameters lost: ", symbol.lost),
                )
                if names
            ]
            if symbol.lines and not verbose:
                told.append(f"{len(symbol.lines)} lines went or came")
            yield from fold("; ".join(told), 11, 13)
            yield from (f"           {line}" for line in symbol.lines if verbose)
    if not verbose and any(symbol.lines for symbol in symbols):
        yield "  --verbose shows the lines"
