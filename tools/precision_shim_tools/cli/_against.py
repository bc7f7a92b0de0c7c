"""``precision-shim doctor --against PATH``: check a framework before installing it.

The doctor reads a wheel or a folder instead of the installed packages, and applies the same checks.
It imports and executes no code of the wheel or folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from precision_shim.errors import SourceError
from precision_shim.process import registry as _registry
from precision_shim.process import settings as _settings
from precision_shim.process import standby
from precision_shim.process import symbols as _symbols
from precision_shim.process import versions as _installed
from precision_shim.process.framework import Adapter
from precision_shim.reporting import text as _status_text
from precision_shim.reporting.record import FrameworkStatus
from precision_shim.reporting.text import fold
from precision_shim.seams._source import looking_at
from precision_shim_adapters.agreement.engine_names import RELIED_ON

from ..predicted import as_dict, predict_status
from ..upstream.trees import Tree, open_tree, over, submodules
from ._output import show, write

Report = dict[str, Any]
"""The result for one framework, as printed with ``--json``: its status; ``holds`` and ``installed``
(the versions that were read in PATH, and where they are installed); ``submodules`` (where in PATH,
of those in a submodule) and ``empty`` submodules; ``problems``; ``ok``."""


def run(asked: argparse.Namespace) -> int:
    """Judge a wheel, a checkout, a folder with packages, or a site-packages folder.

    Raises:
        SourceError: the path contains no framework or backend, or cannot be read.
        SettingsError: a variable has an invalid value.
    """
    standby.stop()
    path = Path(asked.against)
    try:
        judged = _judge_all(path, asked.framework)
    except SourceError as error:
        try:
            return _show_engines(path, as_json=asked.json)
        except SourceError:
            raise error from None
    reports = [report for report, _ in judged]
    if asked.json:
        write(json.dumps(reports if len(reports) > 1 else reports[0], indent=2))
    else:
        show("\n\n".join(_text(report, status, path) for report, status in judged))
    return 0 if all(report["ok"] for report in reports) else 1


def _judge_all(path: Path, framework: str | None) -> list[tuple[Report, FrameworkStatus]]:
    entries = _registry.entries()
    if framework is not None and framework not in entries:
        raise SourceError(f"no framework {framework!r}; allowed: {', '.join(entries)}.")
    asked = [
        entry
        for name, entry in entries.items()
        if (not entry.by_name if framework is None else name == framework)
    ]
    packages = [package for entry in asked for package in entry.packages]
    tree = open_tree(path, (*packages, *_registry.shared()))
    held = [entry for entry in asked if any(map(tree.has, entry.packages))]
    if not held:  # ``path`` has only a backend: check ``framework``, or all installed frameworks
        held = [
            entry
            for entry in asked
            if framework is not None
            or _installed.version_of(entry.distribution, entry.packages) is not None
        ]
    pinned = dict(_pinned(path)) if path.is_dir() else {}
    judged = [_judge(entry, tree, pinned) for entry in held]
    judged = [(report, status) for report, status in judged if report["holds"]]
    if not judged:
        inside = ", ".join(filter(tree.has, _registry.shared()))
        raise SourceError(
            f"{path} holds {inside} and no framework, and none that builds on it is installed "
            f"here. Looked for: {', '.join(packages)}. Name one with --framework."
        )
    return judged


def _pinned(path: Path) -> Iterator[tuple[str, Tree | None]]:
    """Yield a checkout's submodules by their path; ``None`` for an empty folder."""
    for folder in submodules(path):
        name = folder.relative_to(path.resolve()).as_posix()
        if not folder.is_dir() or not any(folder.iterdir()):
            yield name, None
        else:
            with contextlib.suppress(SourceError):  # it has no package that the shim patches
                yield name, open_tree(folder, tuple(_registry.shared()))


def _judge(
    entry: Adapter, tree: Tree, pinned: Mapping[str, Tree | None]
) -> tuple[Report, FrameworkStatus]:
    inside = {"": tree, **{name: one for name, one in pinned.items() if one is not None}}

    def whose(packages: Iterable[str]) -> str | None:
        return next((name for name, one in inside.items() if any(map(one.has, packages))), None)

    def version_of(distribution: str, packages: Iterable[str]) -> str | None:
        packages = list(packages)
        one = inside.get(whose(packages) or "", tree)
        for package in filter(one.has, packages):
            return one.version_of(distribution, package)
        return None if tree.complete else _installed.version_of(distribution, packages)

    name = entry.framework
    settings = _settings.resolve(frameworks=(name,), known_frameworks=_registry.entries())
    # Load the adapter within looking_at(), because an adapter may read source while it is loaded.
    with looking_at(over(*inside.values())):
        status, problems = predict_status(entry, settings, version_of)
        targets = _symbols.targets_by_distribution(_registry.load(entry))
    if status.version is None:  # ``path`` has only a backend, such as Megatron-core
        problems = []
    packages = {name: (package,) for package, name in _registry.shared().items()}
    read: dict[str, dict[str, str]] = {"holds": {}, "installed": {}}
    places: dict[str, str] = {}
    for distribution in targets:
        beneath = packages.get(distribution, entry.packages)
        version = version_of(distribution, beneath)
        if version is not None:
            place = whose(beneath)
            read["holds" if place is not None else "installed"][distribution] = version
            if place:
                places[distribution] = place
    empty = [one for one, found in pinned.items() if found is None] if read["installed"] else []
    read |= {"submodules": places, "empty": dict.fromkeys(empty, "")}
    report = {"framework": name, **as_dict(status), **read, "problems": problems}
    return {**report, "ok": not problems}, status


def _show_engines(path: Path, *, as_json: bool) -> int:
    """Show which of the names that the shim relies on each rollout engine in ``path`` has."""
    lacks_any = False
    tree = open_tree(path, tuple(RELIED_ON))
    for engine in filter(tree.has, RELIED_ON):
        found: dict[str, list[str]] = {"has": [], "lacks": []}
        for places in RELIED_ON[engine]:
            modules, names = (words.split() for words in places.split(": "))
            readers = filter(None, map(tree.find, modules))
            words = set(re.findall(r"\w+", " ".join(read() or "" for read in readers)))
            for name in names:
                found["has" if name in words else "lacks"].append(f"{modules[0]}: {name}")
        lacks_any |= bool(found["lacks"])
        version = tree.version_of(engine, engine)
        if as_json:
            write(json.dumps({"engine": engine, "version": version, **found}, indent=2))
        else:
            lines = [f"  {state:<6} {name}" for state, names in found.items() for name in names]
            show("\n".join([f"{path.name}: the rollout engine {engine} {version}", *lines]))
    return int(lacks_any)


def _text(report: Report, status: FrameworkStatus, path: Path) -> str:
    lines = fold(f"{path.name}, for {report['framework']}", 0, 2)
    for key, where in (("holds", f"in {path.name}"), ("installed", "where it is installed")):
        for name, version in report[key].items():
            pin = report["submodules"].get(name)
            lines += fold(f"{name} {version}, read {where}" + (f"/{pin}" if pin else ""), 2, 4)
    for name in report["empty"]:
        lines += fold(
            f"{name}: pinned by this checkout and empty here, so not what was read: git submodule "
            "update --init --recursive",
            2,
            4,
        )
    features = dict.fromkeys(seam.feature for seam in status.seams)
    lines += ["", *_status_text.framework(report["framework"], status, features, ahead=True)]
    lines += ["", "problems" if report["problems"] else "no problems"]
    for text in report["problems"]:
        lines += fold(text, 2, 4)
    return "\n".join(lines)
