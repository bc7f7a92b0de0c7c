"""``install()``, ``uninstall()`` and ``status()``: the one state of a process.

Data goes one way: settings -> engine -> adapter -> rules -> decision -> status.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from . import _journal, _settings
from ._registry import Entry, entries
from ._settings import PREFIX, Settings
from ._status import FrameworkStatus, SeamStatus, Status
from .errors import PrecisionShimWarning, SeamError, SettingsError
from .seams import Adapter, Engine
from .seams._imports import Watcher
from .seams._source import find_spec

_lock = threading.RLock()


class _Session:
    """What is installed: settings, engine, and the adapters that sleep until they are needed."""

    def __init__(self, settings: Settings, known: Mapping[str, Entry]) -> None:
        self.settings = settings
        self.known = known
        self.awake: dict[str, Adapter] = {}
        self.broken: dict[str, SeamError] = {}
        self.exported: dict[str, str | None] = {}
        self.engine = Engine(
            features=settings.features,
            settings=settings,
            strict=settings.strict,
            on_fault=_fault,
            describe=_describe,
        )
        self.sleeper = Watcher(self._wake, before=True)

    def start(self) -> None:
        import sys

        for entry in self.wanted():
            if any(package in sys.modules for package in entry.packages):
                self.wake(entry)
            else:
                self.sleeper.watch(entry.packages)

    def wanted(self) -> list[Entry]:
        named = self.settings.frameworks
        return [one for name, one in self.known.items() if named is None or name in named]

    def _wake(self, package: str) -> None:
        for entry in self.wanted():
            if package in entry.packages:
                self.wake(entry)

    def wake(self, entry: Entry) -> None:
        with _lock:
            if entry.framework in self.awake or entry.framework in self.broken:
                return
            try:
                adapter = entry.load()
            except SeamError as error:
                self.broken[entry.framework] = error
                self.engine.fault(entry.framework, error, entry.effects)
                return
            self.awake[entry.framework] = adapter
            self.engine.add(adapter)


_current: _Session | None = None
_refused_by_operator = False
_left_behind: list[str] = []


def install(
    *,
    features: str | Iterable[str] | None = None,
    frameworks: str | Iterable[str] | None = None,
    strict: bool | None = None,
    settings: Mapping[str, object] | None = None,
    export: bool = True,
) -> Status:
    """Patch the installed RL frameworks in this process, now or as they are imported.

    Idempotent and thread-safe; may be called before or after a framework is imported. A second
    call with other arguments replaces what the first asked for.

    Args:
        features: names of features, as a list or a comma-separated string, ``-name`` to take one
            away from all; ``None``: ``PRECISION_SHIM_FEATURES``, else all.
        frameworks: names of frameworks; ``None``: ``PRECISION_SHIM_FRAMEWORKS``, else all.
        strict: a refusal is an error; ``None``: whether ``PRECISION_SHIM=strict``.
        settings: the variables by their lower-case names without the prefix, such as
            ``{"optimizer_states": "follow-model"}``.
        export: put what was asked for into this process's environment, for processes started
            later. ``strict`` is never exported.

    Returns:
        What is in force now, as ``status()``.

    Raises:
        SettingsError: a name or value makes no sense.
        SeamError: ``strict``, and a framework that is already imported cannot be patched.
    """
    global _current, _refused_by_operator
    with _lock:
        _refused_by_operator = _settings.switch() == "off"
        if _refused_by_operator:
            _journal.say(f"{PREFIX}={os.environ[PREFIX]} is set: install() does nothing")
            return status()
        asked = (features, frameworks, strict, settings)
        if _current is not None and all(one is None for one in asked):
            return status()
        known = entries()
        resolved = _settings.resolve(
            features=features,
            frameworks=frameworks,
            strict=strict,
            settings=settings,
            known_frameworks=known,
        )
        if _current is not None and _current.settings.effective() != resolved.effective():
            _retire(_current)
            _current = None
        if _current is None:
            _journal.verbosity = resolved["log"]
            _current = _Session(resolved, known)
            _current.start()
        if export:
            _export(_current, resolved)
        if resolved.strict:
            for name in known:
                for error in _current.engine.faults(name):
                    raise error
        return status()


def uninstall() -> None:
    """Take every patch out again and leave each touched namespace as it was.

    Objects already built (optimizers, scalers) keep what they were built with. Variables that
    ``install()`` exported are taken back. Where another tool has wrapped a symbol since, its
    wrapper is left alone, ours passes calls through, and a warning says so.
    """
    global _current
    with _lock:
        if _current is None:
            return
        session, _current = _current, None
        _retire(session)


def status() -> Status:
    """Return what the shim did in this process; ``str()`` of it is a table."""
    with _lock:
        notes = list(_left_behind)
        session = _current
        if session is None:
            if _refused_by_operator:
                notes.insert(0, f"{PREFIX} is off: install() does nothing")
            return Status(enabled=False, decisions=_journal.decisions(), notes=tuple(notes))
        settings = session.settings
        return Status(
            enabled=True,
            features=settings.features,
            settings={**settings.values, "strict": settings.strict},
            frameworks={
                name: _framework(session, name, entry) for name, entry in session.known.items()
            },
            decisions=_journal.decisions(),
            notes=tuple(notes),
        )


def current_settings() -> Settings:
    """The settings in force; the defaults where nothing is installed."""
    session = _current
    return _settings.resolve(environ={}) if session is None else session.settings


def _framework(session: _Session, name: str, entry: Entry) -> FrameworkStatus:
    version = version_of(entry.distribution, entry.packages)
    if session.settings.frameworks is not None and name not in session.settings.frameworks:
        return FrameworkStatus(version, "off", reason="not among the frameworks asked for")
    if name in session.broken:
        return FrameworkStatus(version, "refused", reason=str(session.broken[name]))
    if version is None:
        return FrameworkStatus(None, "absent")
    adapter = session.awake.get(name)
    if adapter is None:
        return FrameworkStatus(version, "pending", reason="waits for the framework's import")
    seams = session.engine.report(name)
    tested = version in adapter.tested
    reason = "" if tested else f"not among the tested versions: {', '.join(adapter.tested)}"
    return FrameworkStatus(version, _summary(seams), seams, reason)


def _summary(seams: Iterable[SeamStatus]) -> str:
    states = {seam.state for seam in seams}
    for state in ("wrapped", "refused", "pending", "native", "off"):
        if state in states:
            return state
    return "absent"


def version_of(distribution: str, packages: Iterable[str]) -> str | None:
    """Version of a framework from its metadata, ``"unknown"`` for a bare checkout, or ``None``."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown" if any(find_spec(package) for package in packages) else None


def _describe(adapter: Adapter) -> str:
    found = version_of(adapter.distribution, adapter.packages)
    return f"{adapter.framework} {found or '(not installed)'}"


def _fault(framework: str, error: SeamError) -> None:
    # A warning filter of "error" must not turn a report into a failing import of the framework.
    try:
        _journal.warn(str(error), stacklevel=4)
    except PrecisionShimWarning:
        _journal.say(str(error))


def _retire(session: _Session) -> None:
    session.sleeper.remove()
    _left_behind[:] = session.engine.remove()
    for text in _left_behind:
        _journal.warn(text, stacklevel=3)
    for variable, before in session.exported.items():
        if before is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = before
    _journal.clear()


def _export(session: _Session, resolved: Settings) -> None:
    wanted = dict(resolved.given)
    if _settings.switch() == "unset":
        wanted[PREFIX] = "1"
    for variable, value in wanted.items():
        session.exported.setdefault(variable, os.environ.get(variable))
        os.environ[variable] = value


def settings_error(error: SettingsError) -> None:
    """Say a bad setting of the automatic start in one line; the process goes on unpatched."""
    _journal.say(f"not installed: {error}")


__all__ = [
    "Any",
    "current_settings",
    "install",
    "settings_error",
    "status",
    "uninstall",
    "version_of",
]
