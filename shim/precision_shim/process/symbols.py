"""The record of digests maps each digest of a symbol's code to the versions that have this code.

It is a generated file in the adapters' package. A seam is never refused because a digest differs.
The code is compared, because a fork may change it without changing the version string.

Beside it, ``sources.json`` maps the digest of a module's whole source to the facts that the seams'
check found in it, so that a process need not parse this source again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from ..seams._source import source_digest
from .digest import digest
from .framework import Adapter
from .registry import shared, symbols_file
from .versions import Versions, version_of

FILE = symbols_file()
SOURCES = FILE.with_name("sources.json")

Record = dict[str, dict[str, dict[str, list[str]]]]
"""Maps distribution, target and digest to the versions whose source has this digest."""


def read_symbols(path: Path = FILE) -> Record:
    """Read the record from a file; the record is empty if the file does not exist.

    Raises:
        ValueError: the file's content is no JSON object.
    """
    if not path.exists():
        return {}
    record = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(record, dict):
        raise ValueError(f"{path} holds no record of symbols, which is a JSON object")
    return record


@lru_cache(maxsize=1)
def shipped() -> Record:
    """The record that this package ships."""
    return read_symbols()


def proofs() -> Callable[[str, str], str | None]:
    """Return a function that tells what is recorded of a fact on a module's present source."""

    @cache
    def facts(module: str) -> dict[str, str]:
        lines = _known_sources().get(source_digest(module), ())
        return {fact: answer for fact, _, answer in (line.partition(" ") for line in lines)}

    return lambda module, fact: facts(module).get(noted(fact))


def noted(fact: str, answer: str = "") -> str:
    """Return a fact, and the answer of a seam's ``native``, as ``sources.json`` has them."""
    return f"{hashlib.sha256(fact.encode()).hexdigest()[:16]} {answer}".rstrip()


@lru_cache(maxsize=1)
def _known_sources() -> dict[str, list[str]]:
    try:
        return dict(json.loads(SOURCES.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # all source is parsed then
        return {}


def versions_of(record: Record, distribution: str) -> list[str]:
    """All recorded versions of a distribution, the oldest first."""
    return in_order(
        version
        for digests in record.get(distribution, {}).values()
        for versions in digests.values()
        for version in versions
    )


def digests_of(record: Record, distribution: str, version: str) -> dict[str, str]:
    """The recorded digests of a version's symbols, by ``"module:name"`` of the symbol."""
    return {
        target: digest
        for target, digests in record.get(distribution, {}).items()
        for digest, versions in digests.items()
        if version in versions
    }


def targets_by_distribution(adapter: Adapter) -> dict[str, list[str]]:
    """Return the symbols that an adapter's seams wrap, grouped by distribution."""
    targets: dict[str, list[str]] = {}
    for target in dict.fromkeys(seam.target for seam in adapter.seams):
        targets.setdefault(_owner(target, adapter), []).append(target)
    return targets


def _owner(target: str, adapter: Adapter) -> str:
    backends = (name for package, name in shared().items() if target.startswith(f"{package}."))
    return next(backends, adapter.distribution)


def is_as(record: Record, distribution: str, version: str, digests: Mapping[str, str]) -> bool:
    """Whether a recorded version has these digests; a digest is empty if the symbol is absent."""
    there = digests_of(record, distribution, version)
    return {target: there.get(target, "") for target in digests} == digests


def equal_version(record: Record, distribution: str, digests: Mapping[str, str]) -> str:
    """Return the newest recorded version that has these digests, or ``""``."""
    versions = reversed(versions_of(record, distribution) if any(digests.values()) else [])
    return next((one for one in versions if is_as(record, distribution, one, digests)), "")


def judge_version(
    adapter: Adapter, version: str, versions: Versions = version_of, *, closely: bool = False
) -> tuple[bool, str]:
    """Return whether a version is tested, and sentences that compare its code with the record.

    With ``closely``, a version whose code differs from the recorded code is not tested.

    There is a sentence for each distribution, of the framework or of a backend, whose version is
    not recorded, and with ``closely`` also for each whose code differs from its version's recorded
    code. A distribution without any recorded version has no sentence.
    """
    tested = plain(version) in adapter.tested
    reasons = [] if tested else [f"not among the tested versions: {', '.join(adapter.tested)}"]
    differing = []
    packages = {name: package for package, name in shared().items()}
    for distribution, targets in targets_by_distribution(adapter).items():
        of_framework = distribution == adapter.distribution
        here = version if of_framework else versions(distribution, (packages[distribution],))
        in_record = versions_of(shipped(), distribution)
        recorded = here is not None and plain(here) in in_record
        if here is None or not in_record or (recorded and not closely):
            continue
        digests = _digests_here(distribution, targets)
        if digests and not recorded:
            equal = equal_version(shipped(), distribution, digests)
            alike = f"all as in {equal}" if equal else "not all as in one recorded version"
            alike = f"{sum(map(bool, digests.values()))} symbols, {alike}"
            reasons.append(alike if of_framework else f"{distribution} {here}: {alike}")
        elif digests and not is_as(shipped(), distribution, plain(here), digests):
            differing.append(f"{distribution} {here} has other code than was recorded")
            tested = tested and not of_framework
    return tested, "; ".join([*reasons, *differing])


def _digests_here(distribution: str, targets: Iterable[str]) -> dict[str, str]:
    record, proved = shipped().get(distribution, {}), proofs()

    def here(target: str) -> str:
        for one in ("", *record[target]):
            if proved(target.partition(":")[0], fact_of_digest(target, one)) is not None:
                return one
        return digest(target)

    return {target: here(target) for target in targets if target in record}


def fact_of_digest(target: str, found: str) -> str:
    """The fact that a symbol has this digest; for ``""``, that the module lacks the symbol."""
    return f"{target} is {found}" if found else f"not {target}"


def missed(adapter: Adapter, versions: Versions = version_of) -> Callable[[str], str]:
    """Return a function that maps an absent symbol to a recorded version that has it, or to ``""``.

    It looks in the newest recorded version up to the installed version; if that is unknown, in the
    recorded version whose code equals the installed code, if there is one.
    """
    packages = {name: (package,) for package, name in shared().items()}

    @cache
    def newest(distribution: str) -> tuple[str, dict[str, str]]:
        here = versions(distribution, packages.get(distribution, adapter.packages))
        if here == "unknown":
            targets = targets_by_distribution(adapter).get(distribution, ())
            here = equal_version(shipped(), distribution, _digests_here(distribution, targets))
        here = plain(here or "")
        in_record = versions_of(shipped(), distribution) if here else []
        earlier = [version for version in in_record if _order(version) <= _order(here)]
        last = earlier[-1] if earlier else ""
        return last, digests_of(shipped(), distribution, last)

    def had(target: str) -> str:
        try:
            distribution = _owner(target, adapter)
            version, targets = newest(distribution)
        except Exception:
            # status() reports a damaged symbols.json, which must not break the framework's import.
            return ""
        return f"{distribution} {version}" if target in targets else ""

    return had


def plain(version: str) -> str:
    """Return a version without its local part, such as ``+cu128``."""
    return version.partition("+")[0]


def in_order(versions: Iterable[str]) -> list[str]:
    """Sort versions, the oldest first, and drop duplicates."""
    return sorted(set(versions), key=_order)


def _order(version: str) -> tuple[Any, ...]:
    from packaging.version import InvalidVersion, Version

    try:
        return 1, Version(version), version
    except InvalidVersion:
        return 0, version
