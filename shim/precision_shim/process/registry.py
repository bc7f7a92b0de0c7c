"""The adapters: ours from a table, third parties' from entry points.

An entry point of the group ``precision_shim.adapters`` has the framework's name and refers to an
``Adapter``. In ``precision_shim`` only this module imports the table of our adapters. Start-up
calls ``packages()``, so this module imports nothing slow at its top.
"""

from .framework import Adapter, Backend, Checkpoints
from .names import ENTRY_POINTS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ..seams._seam import Seam


_declared: "dict[tuple[str, ...], dict[str, Adapter]]" = {}
"""Caches the entry points for each ``sys.path``: a look for them opens a file of each package."""


def entries(*, third_party: bool = True) -> "dict[str, Adapter]":
    """Return all frameworks by name; an entry point cannot replace one of our adapters."""
    import sys

    from precision_shim_adapters.frameworks import FRAMEWORKS, MEGATRON_EFFECTS

    ours, path = {framework.framework: framework for framework in FRAMEWORKS}, tuple(sys.path)
    if third_party and path not in _declared:
        from importlib.metadata import entry_points

        _declared.clear()
        theirs = _declared[path] = {}
        for point in entry_points(group=ENTRY_POINTS):
            name = point.name.strip().lower()
            package = name.replace("-", "_")
            record = Adapter(name, name, (package,), effects=MEGATRON_EFFECTS, place=point.value)
            theirs.setdefault(name, record)
    return {**ours, **_declared[path], **ours} if third_party else ours


def names() -> "Iterator[str]":
    """Yield the names of all frameworks; no entry point is read before the first is taken."""
    yield from entries()


def load(entry: Adapter) -> Adapter:
    """Import an adapter's table of seams, and return the adapter with the table.

    Raises:
        SeamError: the table cannot be imported, or the adapter's seams or ``checkpoints`` are
            invalid.
    """
    from pkgutil import resolve_name

    from ..errors import SeamError
    from .settings import FEATURES

    who, place = entry.framework, entry.place
    try:
        found = (_recorded(place) or resolve_name(place)) if place else entry
    except (Exception, SystemExit) as error:  # a bad adapter must not end the process
        raise SeamError(
            f"{who}: the adapter {place} cannot be loaded: {error!r}. Repair or remove it, or "
            f"leave {who} out with PRECISION_SHIM_FRAMEWORKS."
        ) from error
    adapter = entry.replace(seams=found, place="") if isinstance(found, tuple) else found
    if not isinstance(adapter, Adapter):
        raise SeamError(
            f"{who}: {place} is a {type(found).__name__}, allowed: "
            "precision_shim.adapting.Adapter. Correct the entry point."
        )
    if adapter.place and adapter is not entry:
        return load(adapter)
    try:
        foreign = [seam for seam in adapter.seams if seam.feature not in FEATURES]
    except Exception as error:
        raise SeamError(
            f"{who}: the seams of {place} cannot be read: {error!r}. Correct the adapter."
        ) from error
    for seam in foreign:
        raise SeamError(
            f"{adapter.framework}: {seam.name} is declared for the feature {seam.feature!r}; "
            f"allowed: {', '.join(FEATURES)}. Correct the function's seam(...)."
        )
    wrong = _find_fault(adapter.checkpoints)
    if wrong:
        raise SeamError(f"{who}: the checkpoints of {place}: {wrong}. Correct the adapter.")
    return adapter


def _recorded(place: str) -> "tuple[Seam, ...] | None":
    """Return the table of seams at ``place`` from its record, unless the table is imported."""
    import sys

    file = record_file(place)
    if file is None or place.partition(":")[0] in sys.modules:
        return None
    try:
        from ..seams._later import read_record

        return read_record(file.read_text(encoding="utf-8"), source_of_adapters())
    except Exception:  # no record, or no source: the table is imported
        return None


def record_file(place: str) -> "Path | None":
    """Return the path of the record of an adapter's table; ``None`` for a third party's."""
    package, _, rest = place.partition(".")
    folder = symbols_file().parent
    return folder / rest.partition(".")[0] / "seams.json" if package == folder.name else None


def source_of_adapters() -> str:
    """Return the SHA-256 of our adapters' source, in hexadecimal."""
    from hashlib import sha256

    files = sorted(symbols_file().parent.rglob("*.py"))
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _find_fault(checkpoints: object) -> str:
    import re

    if checkpoints is None:
        return ""
    if not isinstance(checkpoints, Checkpoints):
        kind = type(checkpoints).__name__
        return f"a {kind}, allowed: precision_shim.adapting.Checkpoints"
    models: object = checkpoints.models
    if not isinstance(models, tuple):
        return f"models={models!r}, allowed: a tuple of names"
    try:
        groups = re.compile(checkpoints.steps).groups
    except (re.error, TypeError) as error:
        return f"steps={checkpoints.steps!r} is no regular expression: {error}"
    if groups != 1:
        return f"steps={checkpoints.steps!r} has {groups} groups, allowed: one, the step's number"
    return ""


_said: "dict[tuple[str, ...], dict[str, Adapter]]" = {}
"""Caches third parties' records for each ``sys.path``: the audit reads them once per optimizer."""


def records() -> "dict[str, Adapter]":
    """Return complete records of all frameworks; of a broken adapter, the entry point's data."""
    import sys
    from contextlib import suppress

    from ..errors import SeamError

    ours = entries(third_party=False)
    path = tuple(sys.path)
    theirs = _said.get(path)
    if theirs is None:
        theirs = {name: declared for name, declared in entries().items() if name not in ours}
        loaded = {}
        for name, declared in theirs.items():
            with suppress(SeamError):
                loaded[name] = load(declared)
        theirs.update(loaded)
        if len(loaded) == len(theirs):  # an adapter may fail now, but load later
            _said.clear()
            _said[path] = theirs
    return {**ours, **theirs}


def packages() -> "set[str]":
    """Return the packages whose import loads one of our adapters if the user named no framework."""
    from precision_shim_adapters.frameworks import FRAMEWORKS

    return {package for one in FRAMEWORKS if not one.by_name for package in one.packages}


def by_name() -> "set[str]":
    """Return the supported frameworks that the shim patches only if the user names them."""
    from precision_shim_adapters.frameworks import FRAMEWORKS

    return {framework.framework for framework in FRAMEWORKS if framework.by_name}


def backends() -> "tuple[Backend, ...]":
    """The backends that several frameworks are built on."""
    from precision_shim_adapters.frameworks import BACKENDS

    return BACKENDS


def shared() -> "dict[str, str]":
    """Return the backends' packages that contain seams, each with its distribution's name."""
    return {package: name for backend in backends() for package, name in backend.shared.items()}


def audit_readers(*, third_party: bool = True) -> "dict[str, str]":
    """Map each package of optimizers to the ``"module:function"`` that reads these optimizers."""
    theirs = records().values() if third_party else ()
    tables = [one.audit_readers for one in (*theirs, *backends())]
    return {package: place for readers in tables for package, place in readers.items()}


def checkpoint_readers(framework: str) -> "dict[str, str]":
    """Map each kind of checkpoint files to the function that assigns tensors to components."""
    whose = records().get(framework)
    tables = [one.checkpoint_readers for one in (*backends(), whose) if one is not None]
    return {kind: place for readers in tables for kind, place in readers.items()}


def checkpoints() -> "dict[str, Checkpoints]":
    """Return ``Checkpoints`` by framework name, for each framework that declares them."""
    found = records().items()
    return {name: one.checkpoints for name, one in found if one.checkpoints is not None}


def symbols_file() -> "Path":
    """Return the path of ``symbols.json``, with digests of the symbols that the adapters patch."""
    from pathlib import Path

    import precision_shim_adapters

    return Path(str(precision_shim_adapters.__file__)).with_name("symbols.json")
