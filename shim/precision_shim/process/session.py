"""``install()``, ``uninstall()`` and ``status()``, which share one session per process.

Data flows in one direction: settings -> seam engine -> adapter -> rules -> decision -> status.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, NoReturn

from ..auditing import latest
from ..auditing.loads import PlannedLoads
from ..errors import PrecisionShimError, SeamError, SettingsError
from ..reporting import journal as _journal
from ..reporting.record import FrameworkStatus, SeamStatus
from ..reporting.status import Status
from ..seams._engine import SeamEngine
from . import forks as _forks
from . import settings as _settings
from . import standby
from .actors import Actors
from .carriers import ray
from .finders import Watcher
from .framework import Adapter
from .in_force import asked_for, offered
from .in_force import in_force as _by_settings
from .marks import Marks
from .registry import entries, load
from .settings import PREFIX, Settings
from .symbols import judge_version, missed, plain, proofs
from .versions import describe, version_of

_lock = _forks.Lock()
_loading = _forks.Loading()
_AUDIT_DIR = _settings.TABLE["audit_dir"].variable


class _Session:
    """State of one ``install()``: settings, seam engine, and adapters of imported frameworks."""

    def __init__(
        self, settings: Settings, every: Mapping[str, Adapter], fault: SettingsError | None = None
    ) -> None:
        self.settings = settings
        self.entries = every
        self.asked = [entry for name, entry in every.items() if asked_for(settings, name)]
        self.fault = fault
        """An invalid setting's error in strict mode; building an optimizer or a DDP raises it."""
        self.awake: dict[str, Adapter] = {}
        self.broken: dict[str, PrecisionShimError] = {}
        self.standing: dict[str, tuple[bool, str]] = {}
        """Caches the result of ``judge_version``, which reads source code, for each framework."""
        self.exported: dict[str, tuple[str | None, str]] = {}
        """Maps an exported variable to its value before ``install()`` and its exported value."""
        self.engine = SeamEngine(
            features=settings.features,
            settings=settings,
            strict=settings.strict,
            on_fault=self._say,
            describe=describe,
            missed=missed,
            proved=proofs,
        )
        self.sleeper = Watcher(self._wake, before=True)
        self.marks = Marks(settings)
        self.actors = Actors(self.awake, settings.strict)
        self.loads = PlannedLoads(self.awake, settings.strict)
        self.late: list[str] = []
        """What existed before ``install()`` and stays without the shim."""

    def _say(self, framework: str, error: PrecisionShimError) -> None:
        if self.fault is None:  # start() has printed ``fault``
            _journal.warn_or_say(str(error))  # a warning that is an error would make an import fail

    def start(self) -> None:
        standby.stop()  # from here on, the session's watcher waits for imports
        self.sleeper.watch(package for entry in self.asked for package in entry.packages)
        if self.fault is None:
            self.late = [_RAY] if ray.came_first() else []
            ray.enter()
            self.marks.enter()
            if "audit" in self.settings.features:
                self.loads.enter()
            if not self.late:  # else the text ``_RAY`` is printed
                self.actors.enter()
            built = _optimizers_built() if self.imported() else ""
            self.late += [_LATE.format(built)] if built else []
        for text in self.late:
            _journal.warn_or_say(text)
        if self.settings["audit_dir"]:
            atexit.register(self.say_unaudited)

    def say_unaudited(self) -> None:
        """Say why a process that built an optimizer has written no audit."""
        built = _optimizers_built()
        if built and not latest.named() and "audit" in self.settings.features:
            names = ", ".join(self.awake) or "none"
            standby.say(
                f"{_AUDIT_DIR}={self.settings['audit_dir']}: no audit was written: this process "
                f"built an optimizer ({built}), but not by a way that an adapter in force "
                f"({names}) audits. Call watch() in your adapter; precision_shim.audit(model, "
                "optimizer) shows what is in force."
            )

    def imported(self) -> list[Adapter]:
        """Return the frameworks to patch that are imported, or are being imported."""
        return [one for one in self.asked if not sys.modules.keys().isdisjoint(one.packages)]

    def _wake(self, package: str) -> None:
        self.wake(entry for entry in self.asked if package in entry.packages)

    def wake(self, entries: Iterable[Adapter]) -> None:
        """Load adapters. Do not hold a lock: their code may import a framework."""
        for entry in entries:
            if entry.framework not in (*self.awake, *self.broken):
                with _loading:
                    error: PrecisionShimError | None = self.fault
                    try:
                        adapter = load(entry)
                    except SeamError as failed:
                        adapter, error = entry, error or failed
                    with _lock:
                        self._take_on(entry, adapter, error)

    def _take_on(self, entry: Adapter, adapter: Adapter, error: PrecisionShimError | None) -> None:
        if _current is not self or entry.framework in (*self.awake, *self.broken):
            return  # a fork's child, or another thread was faster
        if error is not None:
            self.broken[entry.framework] = error
            self.engine.fault(entry.framework, error, entry.effects)
            return
        self.awake[entry.framework] = adapter
        self.engine.add(adapter)
        if not entry.by_name:
            self._warn_of_idle_settings(adapter)

    def _warn_of_idle_settings(self, adapter: Adapter) -> None:
        features = {seam.feature for seam in adapter.seams}
        # Whether other features' settings have an effect depends on a job: the plan reports it.
        others = {*_settings.FEATURES} - {_settings.AGREEMENT}
        in_force = features & set(self.settings.features) | others
        for row in _settings.idle(self.settings, in_force):
            off = row.feature in features
            because = f"{row.feature} is off" if off else f"the shim has no {row.feature} for it"
            error = SettingsError(
                f"{describe(adapter)}: {row.variable}={self.settings[row.name]} has no effect, "
                f"because {because}. Unset {row.variable}."
            )
            self.engine.fault(adapter.framework, error, adapter.effects)


_RAY = (
    "ray.init() ran before install(): the job's workers run without the shim, unless their nodes "
    f"set {PREFIX}. Call install() before ray.init(), or export {PREFIX}=1 where the driver starts."
)


_LATE = (
    "an optimizer ({}) was built before install(): if it is still in use, it, its engine, loss "
    "scaler and gradient buckets stay as they were built, which precision_shim.audit(model, "
    "optimizer) shows. Call install() before the framework builds its engine, or build the engine "
    "again."
)


def _optimizers_built() -> str:
    """Return the classes of the optimizers built in this process, which may not exist any more.

    It does not ask whether they still exist: gc.get_objects() would break other threads, because it
    returns tuples that they are building.
    """
    base = getattr(sys.modules.get("torch.optim"), "Optimizer", None)
    kinds = [] if base is None else [base]
    for kind in kinds:
        kinds += type.__subclasses__(kind)
    # torch marks the ``step`` of a class when the first optimizer of the class is built.
    built = {one.__name__ for one in kinds if getattr(vars(one).get("step"), "hooked", False)}
    return ", ".join(sorted(built))


_current: _Session | None = None
_refused_by_operator = False
_bad_start = ""
_left_behind: list[str] = []


def install(
    *,
    features: str | Iterable[str] | None = None,
    frameworks: str | Iterable[str] | None = None,
    strict: bool | None = None,
    settings: Mapping[str, object] | None = None,
    export: bool = True,
    **unknown: NoReturn,
) -> Status:
    """Patch the installed RL frameworks in this process, now or as they are imported.

    ``install`` is idempotent and thread-safe. A second call with other arguments replaces the first
    installation.

    Args:
        features: names, as a list or a comma-separated string; ``-name`` excludes a feature.
            ``None``: the value of ``PRECISION_SHIM_FEATURES``, or all if that is unset.
        frameworks: names of frameworks. ``None`` means the value of ``PRECISION_SHIM_FRAMEWORKS``,
            or all frameworks except ``megatron`` if the variable is unset.
        strict: whether a refused seam raises an error; ``None``: if ``PRECISION_SHIM=strict``.
        settings: values keyed by the variables' lower-case names without the prefix, such as
            ``{"optimizer_states": "follow-model"}``.
        export: whether processes started later inherit the arguments, except ``strict``.
        unknown: no other argument is allowed.

    Returns:
        The result of ``status()``.

    Raises:
        SettingsError: a name is unknown, or a value is invalid.
        SeamError: under ``strict``, a framework that is already imported cannot be patched.
    """
    for name in unknown:
        raise _settings.unknown_argument(name)
    asked = {"features": features, "frameworks": frameworks, "strict": strict, "settings": settings}
    session = _install(export, **asked)
    if session is not None:
        session.wake(session.imported())
        session.engine.catch_up()  # not under the lock: catch_up() waits for other threads' imports
        if session.settings.strict:
            for name in session.entries:
                for error in session.engine.faults(name):
                    raise error
    return status()


def _install(export: bool, **asked: Any) -> _Session | None:
    """Install without loading adapters or raising seam errors; ``None`` if the shim is off."""
    global _current, _refused_by_operator, _bad_start
    with _lock:
        _refused_by_operator = _settings.switch() == "off"
        if _refused_by_operator:
            standby.say(f"{PREFIX}={os.environ[PREFIX]} is set: install() does nothing")
            return None
        again = all(argument is None for argument in asked.values())
        if again and _current is not None and _current.fault is None:
            _export(_current, _current.settings, export)
            return _current
        every = entries()
        environ = _given_environment()
        resolved = _settings.resolve(**asked, known_frameworks=every, environ=environ)
        if _current is not None and (
            _current.fault is not None or _current.settings.effective() != resolved.effective()
        ):
            _retire(_current)
            _current = None
        if _current is None:
            _bad_start = ""
            _journal.verbosity = resolved["log"]
            _current = _Session(resolved, offered(every, resolved))
            _current.start()
        _export(_current, resolved, export)
        return _current


def start(*, export: bool = False) -> None:
    """Install at a process's start, with settings from environment variables; never raises.

    An invalid setting is printed to stderr, and no seam is patched; in strict mode the error is
    raised when an optimizer or a DDP is built (``Adapter.effects``).

    Args:
        export: as in ``install()``; true if ``PRECISION_SHIM`` may be unset in this process.
    """
    global _current, _bad_start
    try:
        with _lock:
            standby.stop()
            try:
                session = _install(export)
            except SettingsError as error:
                session = None
                _bad_start = f"not installed: {error}"
                standby.say(_bad_start)
                if os.environ.get(PREFIX, "").strip().lower() == "strict":
                    defaults = _settings.resolve(features=(), strict=True, environ={})
                    _current = session = _Session(defaults, offered(entries(), defaults), error)
                    session.start()
        if session is not None:
            session.wake(session.imported())
    except (Exception, SystemExit) as error:  # a defect of the shim must not end the process
        standby.say(f"not installed: {error!r}")


def uninstall() -> None:
    """Remove every patch, restore each patched namespace and variable, and stop the audit.

    Optimizers and scalers that are already built keep their precision. Save a checkpoint before
    ``uninstall()``, because later checkpoints are written without the shim. If another tool has
    wrapped one of our wrappers, ours stays but only calls the original; a warning names the symbol.
    """
    global _current, _bad_start
    with _lock:
        standby.stop()
        ray.leave()
        _bad_start = ""
        if _current is None:
            latest.clear()  # stop watch_updates(), which also works without install()
            return
        session, _current = _current, None
        _retire(session)


def _give_up_in_child() -> None:
    """Undo, in the child of a fork, an installation that the fork interrupted, and report it."""
    global _bad_start
    if _forks.interrupted:
        _forks.interrupted = False
        uninstall()
        _bad_start = (
            "not installed: this process was forked while the shim was being installed, by a "
            "thread that is not in it or not done. Call install() here, or fork later."
        )
        standby.say(_bad_start)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_give_up_in_child)  # runs after the locks' fork handlers


def status() -> Status:
    """Return the shim's status in this process; ``str(status())`` is one screen of text."""
    if standby.waiting():
        start()  # PRECISION_SHIM is set, but no framework was imported yet
    with _lock:
        session = _current
        why = _bad_start or (_why_off() if session is None else "")
        notes = [why, *_left_behind] if why else list(_left_behind)
        if session is None:
            return Status(enabled=False, decisions=_journal.decisions(), notes=tuple(notes))
        settings = session.settings
        notes += [*session.late, *latest.problems()]
        return Status(
            enabled=session.fault is None,
            features=settings.features,
            settings={**settings.values, "strict": settings.strict},
            frameworks={
                name: _framework(session, name, entry) for name, entry in session.entries.items()
            },
            decisions=_journal.decisions(),
            notes=tuple(notes),
            given=tuple(name for name in settings.values if settings.is_set(name)),
            audit=latest.audits(),
        )


def _why_off() -> str:
    try:
        switch = _settings.switch()
    except SettingsError as error:
        return f"not installed: {error}"
    if _refused_by_operator or switch == "off":
        return f"{PREFIX} is off: install() does nothing"
    if switch == "unset":
        return (
            "nothing is installed in this process: call install(), or set "
            f"{PREFIX}=1 where the process is started"
        )
    return (
        f"{PREFIX} is set, but nothing is installed: this process read no start-up file "
        "(python -S?), or uninstall() was called. Call install(), or import "
        "precision_shim.autoinstall."
    )


def in_force(framework: str, feature: str, group: str) -> bool:
    """Whether a framework's feature is on in this process and the group of seams is not refused."""
    session = _current
    return (
        session is not None
        and framework not in session.broken
        and _by_settings(session.settings, framework, feature, group, session.engine.is_refused)
    )


def is_installed() -> bool:
    """Whether ``install()`` is in force in this process."""
    return _current is not None


def current_settings() -> Settings:
    """Return the settings in force; the defaults if nothing is installed."""
    session = _current
    return _settings.resolve(environ={}) if session is None else session.settings


def check_ranks(group: Any = None) -> None:
    """Raise an error unless all ranks of a group (``None``: all) run the shim as this one does.

    Call it before a collective operation of the shim, and before the shim changes one of a
    framework's. It reads the group's store: it is no collective operation itself, and does nothing
    for ranks that it has compared before.

    Raises:
        PartialInstallationError: a rank has no shim, or another version or settings.
    """
    session = _current
    if session is not None and session.fault is None:
        session.marks.check(group)


def _framework(session: _Session, name: str, entry: Adapter) -> FrameworkStatus:
    adapter = session.awake.get(name)
    found = adapter or entry  # a third party's entry point has no distribution
    version = version_of(found.distribution, found.packages)
    if entry not in session.asked:
        return FrameworkStatus(version, "off", reason="not among the frameworks asked for")
    if name in session.broken:
        return FrameworkStatus(version, "refused", reason=str(session.broken[name]))
    if version is None:
        return FrameworkStatus(None, "absent")
    if adapter is None:
        return FrameworkStatus(version, "pending", reason="waits for the framework's import")
    seams = session.engine.report(name)
    if name not in session.standing:
        try:
            session.standing[name] = judge_version(adapter, version)
        except Exception as error:  # a damaged symbols.json must not make install() fail
            reason = f"its symbols could not be compared with the record: {error!r}"
            session.standing[name] = plain(version) in adapter.tested, reason
    tested, reason = session.standing[name]
    return FrameworkStatus(version, _summary(seams), seams, reason, tested)


def _summary(seams: Iterable[SeamStatus]) -> str:
    states = {seam.state for seam in seams}
    order = ("wrapped", "refused", "pending", "native", "off")
    return next((state for state in order if state in states), "absent")


def _retire(session: _Session) -> None:
    session.sleeper.remove()
    session.marks.leave()
    session.actors.leave()
    session.loads.leave()
    atexit.unregister(session.say_unaudited)
    _left_behind[:] = session.engine.remove()
    _take_back(session, os.environ)
    _journal.clear()
    latest.clear()
    for text in _left_behind:
        _journal.warn_or_say(text)  # raises no error, which would stop uninstall() halfway


def _given_environment() -> dict[str, str]:
    """Return the environment without the variables that an earlier ``install()`` exported."""
    environ = dict(os.environ)
    if _current is not None:
        _take_back(_current, environ)
        if environ.get(_AUDIT_DIR):  # a relative path is relative to where install() was called
            environ[_AUDIT_DIR] = os.environ[_AUDIT_DIR]
    return environ


def _take_back(session: _Session, environ: MutableMapping[str, str]) -> None:
    """Restore exported variables, except those that other code has set since."""
    for variable, (before, ours) in session.exported.items():
        if environ.get(variable) == ours:
            del environ[variable]
            if before is not None:
                environ[variable] = before


def _export(session: _Session, resolved: Settings, arguments: bool) -> None:
    wanted = dict(resolved.given) if arguments else {}
    if resolved.origin["audit_dir"] == "variable":  # child processes may start elsewhere
        wanted[_AUDIT_DIR] = resolved["audit_dir"]
    if arguments and _settings.switch() == "unset":
        wanted[PREFIX] = "1"
    for variable, value in wanted.items():
        before = session.exported.get(variable, (os.environ.get(variable), ""))[0]
        session.exported[variable] = before, value
        os.environ[variable] = value
