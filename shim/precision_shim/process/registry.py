"""Which adapters there are: our own as declared, third parties' through an entry point.

An entry point of the group ``precision_shim.adapters`` names a ``seams.Adapter`` object; its name
is the framework's. Ours are declared in ``precision_shim_adapters.frameworks``, which no other
module of the core imports. Either's modules are imported only when one of the framework's packages
is. The start-up asks here for the packages; so nothing is imported at the top.
"""

from .framework import Backend, Checkpoints, Framework
from .names import ENTRY_POINTS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "audit_readers",
    "backends",
    "checkpoint_readers",
    "checkpoints",
    "entries",
    "is_tested",
    "packages",
    "records",
    "shared",
    "symbols_file",
]


def entries(*, third_party: bool = True) -> "dict[str, Framework]":
    """All known frameworks by name; ours cannot be displaced by an entry point."""
    from precision_shim_adapters.frameworks import FRAMEWORKS, MEGATRON_EFFECTS

    found = {one.framework: one for one in FRAMEWORKS}
    if third_party:
        from importlib.metadata import entry_points

        for point in entry_points(group=ENTRY_POINTS):
            name = point.name.strip().lower()
            package = name.replace("-", "_")
            found.setdefault(
                name, Framework(name, name, (package,), point.value, effects=MEGATRON_EFFECTS)
            )
    return found


_said: "dict[tuple[str, ...], dict[str, Framework]]" = {}
"""What third parties' adapters say, by the path that they were looked for on: it is asked for each
optimizer, and reading every distribution's entry points takes 10 to 50 ms."""


def records(*, third_party: bool = True) -> "dict[str, Framework]":
    """All known frameworks with all that their adapters say; a third party's adapter is loaded.

    One that cannot be loaded has no more than its entry point; the doctor says why.
    """
    import sys

    ours = entries(third_party=False)
    path = tuple(sys.path)
    if third_party and path not in _said:
        found = {name: one for name, one in entries().items() if name not in ours}
        _said.clear()
        _said[path] = {name: _as_said(one) for name, one in found.items()}
    return {**ours, **_said[path]} if third_party else ours


def _as_said(entry: Framework) -> Framework:
    from ..errors import SeamError

    try:
        return entry.as_said()
    except SeamError:
        return entry


def packages() -> "set[str]":
    """The packages whose import wakes an adapter of ours."""
    from precision_shim_adapters.frameworks import FRAMEWORKS

    return {package for one in FRAMEWORKS for package in one.packages}


def backends() -> "tuple[Backend, ...]":
    """What several frameworks are built on."""
    from precision_shim_adapters.frameworks import BACKENDS

    return BACKENDS


def shared() -> "dict[str, str]":
    """Packages that frameworks build on and that seams are in, to their distributions' names."""
    return {package: name for one in backends() for package, name in one.shared.items()}


def audit_readers(*, third_party: bool = True) -> "dict[str, str]":
    """Top-level package of an optimizer's class, to what reads such optimizers for the audit."""
    theirs = records().values() if third_party else ()
    told = [*(one.audit_readers for one in theirs), *(one.audit_readers for one in backends())]
    return {package: place for one in told for package, place in one.items()}


def checkpoint_readers(framework: str) -> "dict[str, str]":
    """Kind of the files of a framework's checkpoint, to what sorts their tensors."""
    told = [one.checkpoint_readers for one in backends()]
    whose = records().get(framework)
    if whose is not None:
        told.append(whose.checkpoint_readers)
    return {kind: place for one in told for kind, place in one.items()}


def checkpoints(*, third_party: bool = True) -> "dict[str, Checkpoints]":
    """By framework: how its checkpoints are called, and what foretells a resume."""
    known = records(third_party=third_party)
    return {name: one.checkpoints for name, one in known.items() if one.checkpoints is not None}


def symbols_file() -> "Path":
    """The record of digests that ships with the adapters."""
    from pathlib import Path

    import precision_shim_adapters

    return Path(str(precision_shim_adapters.__file__)).with_name("symbols.json")


def is_tested(version: str, tested: "tuple[str, ...]") -> bool:
    """Whether a version is among the tested ones; what a build has added to it does not count."""
    return version.partition("+")[0] in tested
