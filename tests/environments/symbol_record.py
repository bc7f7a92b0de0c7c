"""The record of symbols: add what is installed here to it, or show what a release changes.

    python tests/environments/symbol_record.py FILE
    python tests/environments/symbol_record.py --changes PATH FRAMEWORK

The first form adds the digests of the installed frameworks to FILE. The second compares the symbols
of a wheel or folder with the installed ones, and shows the lines that went or came.
"""

from __future__ import annotations

import ast
import difflib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

from precision_shim.process import registry, standby, versions
from precision_shim.process import symbols as _symbols
from precision_shim.process.digest import digest, digest_of
from precision_shim.process.framework import Adapter
from precision_shim.process.symbols import Record, in_order, plain
from precision_shim.seams import Seam, Symbol, is_there, look
from precision_shim.seams._plan import fact_of, missing
from precision_shim.seams._source import (
    Definition,
    Reader,
    definition,
    installed,
    looking_at,
    source_digest,
)
from precision_shim_tools.upstream.trees import open_tree, over


def write(record: Record, path: Path) -> None:
    """Write a record in a fixed order, so that equal records give equal files."""
    ordered = {
        distribution: {
            target: {digest: in_order(versions) for digest, versions in sorted(digests.items())}
            for target, digests in sorted(targets.items())
        }
        for distribution, targets in sorted(record.items())
    }
    path.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


def add(record: Record, distribution: str, version: str, digests: Mapping[str, str]) -> None:
    """Add a version's symbols to ``record`` in place, and remove the version's earlier digests.

    ``version`` loses a local part, such as ``+cu128``. ``digests`` is by ``"module:name"``; a
    digest is empty if this version lacks the symbol.
    """
    version = plain(version)
    known = record.setdefault(distribution, {})
    for target, current in digests.items():
        kept = {
            earlier: [other for other in versions if other != version]
            for earlier, versions in known.pop(target, {}).items()
        }
        if current:
            kept[current] = in_order([*kept.get(current, ()), version])
        kept = {recorded: versions for recorded, versions in kept.items() if versions}
        if kept:
            known[target] = kept
    if not known:
        del record[distribution]


def installed_digests(adapter: Adapter) -> Iterable[tuple[str, str, dict[str, str]]]:
    """Yield name, version and digests of each patched distribution whose version is known."""
    packages = {name: (package,) for package, name in registry.shared().items()}
    for name, targets in _symbols.targets_by_distribution(adapter).items():
        version = versions.version_of(name, packages.get(name, adapter.packages))
        if version not in (None, "unknown"):
            yield name, str(version), {target: digest(target) for target in targets}


def facts_of(seam: Seam) -> Iterator[tuple[str, ...]]:
    """Yield each fact on the source that a seam asks for: module, fact and ``native``'s answer."""
    symbol = look(seam.target)
    if not symbol.problem and not missing(seam, symbol):
        answer = _answer(seam, symbol)
        if answer is not None:
            yield seam.module, fact_of(seam), answer
    for condition in (seam.target, *seam.only_if, *seam.unless):
        yield condition.partition(":")[0], condition if is_there(condition) else f"not {condition}"


def _answer(seam: Seam, symbol: Symbol) -> str | None:
    """The answer of ``native``; ``None`` if other source than the symbol's or a setting matters."""
    modules = {seam.module}

    def source(module: str) -> Reader | None:
        modules.add(module)
        return installed(module)

    try:
        with looking_at(source):
            answer = (seam.native(symbol, None) if seam.native else None) or ""
    except TypeError:  # it reads a setting
        return None
    return answer if modules == {seam.module} else None


def record(file: Path) -> None:
    """Add the digests of what is installed here to a file of symbols.

    Of Megatron it adds what any adapter wraps, because a framework also runs on the Megatron that
    another framework's environment pins.
    """
    known, sources = _symbols.read_symbols(file), file.with_name(_symbols.SOURCES.name)
    facts = json.loads(sources.read_text(encoding="utf-8")) if sources.exists() else {}
    for entry in registry.entries(third_party=False).values():
        adapter, of_digests = registry.load(entry), []
        for name, version, digests in installed_digests(adapter):
            add(known, name, version, digests)
            print(f"{name} {version}: {sum(map(bool, digests.values()))} symbols")
            of_digests += [
                (target.partition(":")[0], _symbols.fact_of_digest(target, found))
                for target, found in digests.items()
            ]
        for module, *fact in chain(*map(facts_of, adapter.seams), of_digests):
            digest_here = source_digest(module)
            if digest_here:
                facts.setdefault(digest_here, []).append(_symbols.noted(*fact))
    write(known, file)
    ordered = {one: sorted({*found}) for one, found in sorted(facts.items())}
    sources.write_text(json.dumps(ordered, indent=0) + "\n", encoding="utf-8")


def changes(path: Path, framework: str) -> None:
    """Print each symbol of a framework that ``path`` has, compared with the installed one."""
    entry = registry.entries()[framework]
    tree = open_tree(path, (*entry.packages, *registry.shared()))
    with looking_at(over(tree)):
        adapter = registry.load(entry)
        targets = [
            one for each in _symbols.targets_by_distribution(adapter).values() for one in each
        ]
        there = {one: definition(one) for one in targets if tree.owns(one.partition(":")[0])}
    for target, new in there.items():
        old = definition(target)
        if old is None or new is None:
            if old or new:
                print("new " if new else "gone", target)
        elif digest_of(old.node) == digest_of(new.node):
            print("same", target)
        else:
            print("changed", target)
            lines = difflib.unified_diff(_lines(old), _lines(new), lineterm="", n=0)
            print(*(f"    {one}" for one in lines if one[:3] not in ("---", "+++")), sep="\n")


def _lines(found: Definition) -> list[str]:
    return ast.unparse(found.node).splitlines()


if __name__ == "__main__":
    standby.stop()  # nothing that is read here may be patched
    if sys.argv[1] == "--changes":
        changes(Path(sys.argv[2]), sys.argv[3])
    else:
        record(Path(sys.argv[1]))
