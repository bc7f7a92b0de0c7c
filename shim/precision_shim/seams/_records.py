"""What an adapter declares: one record per seam, one list per framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ._source import Symbol

NativeProbe = Callable[[Symbol, Any], "str | None"]
"""Looks at a seam's symbol and at the settings; returns why the framework does the feature
itself, or ``None`` when it does not."""

Replacement = Callable[[Any], Any]
"""Gets what a symbol holds and returns what is to stand there until the shim is taken out."""


@dataclass(frozen=True)
class Seam:
    """One place of a framework where the shim enters.

    Installer, uninstaller, status, documentation and tests all read these records.

    Attributes:
        target: ``"module:attribute"``, in the module that *defines* the symbol; names of a class
            body are joined with a dot (``"pkg.mod:Class.method"``).
        feature: the feature that needs the seam.
        wrapper: ``"module:function"``, with wrapt's signature ``(wrapped, instance, args,
            kwargs)``; imported only when the target appears. The same target and wrapper under
            two features are wrapped once. Empty: a record of what the framework does itself.
        why: why the shim enters here and not elsewhere.
        upstream: link to the discussion upstream, where there is one.
        delete_when: when this record can be deleted.
        path: name of the path through the framework that the seam belongs to. Per feature and
            path all seams hold or none is patched.
        parameters: parameters that the symbol must have.
        relies_on: identifiers that the symbol's source (for a method: its class's) must contain;
            the facts that the wrapper builds on.
        aliases: ``"module:attribute"`` names that other modules bound by ``from ... import``; a
            late install reaches them, as long as they still hold the original.
        native: ``"module:function"`` of a ``NativeProbe``.
        optional: an absent module makes the seam ``absent``, not ``refused``.
        refusal: why the feature cannot be had here. Such a seam's wrapper only says so (or
            raises, in strict mode) when the framework gets there.
        replaces: ``wrapper`` is a ``Replacement`` instead: it makes what stands in the symbol's
            place. For a symbol that callers do not call but build on, such as a class that a
            decorator has turned into something else.
    """

    target: str
    feature: str
    wrapper: str
    why: str
    upstream: str = ""
    delete_when: str = ""
    path: str = ""
    parameters: tuple[str, ...] = ()
    relies_on: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    native: str = ""
    optional: bool = False
    refusal: str = ""
    replaces: bool = False

    @property
    def module(self) -> str:
        """Dotted name of the defining module."""
        return self.target.partition(":")[0]

    @property
    def attribute(self) -> str:
        """Dotted path of the symbol within its module."""
        return self.target.partition(":")[2]


@dataclass(frozen=True)
class Adapter:
    """A framework, as the shim sees it.

    Attributes:
        framework: the name that users write, such as ``"verl"``.
        distribution: the name of its distribution, for its version.
        packages: top-level packages whose import shows that the framework is in use.
        tested: versions that the test environments pin.
        seams: the table of seams; of several on one target the first is the innermost wrapper.
        effects: ``"module:attribute"`` targets where a feature first takes effect (an optimizer
            or a DDP is built). In strict mode a fault is raised there, and nowhere earlier.
        paths: what users call the paths of the seams, such as ``{"fsdp": "FSDP engine"}``; one
            that is not here is shown by its own name. A name that ends in brackets, such as
            ``"FSDP engine (metrics)"``, is a path that only serves others: ``str(status())`` shows
            it where it was refused, and else leaves it to ``details()``.
    """

    framework: str
    distribution: str
    packages: tuple[str, ...]
    tested: tuple[str, ...]
    seams: tuple[Seam, ...]
    effects: tuple[str, ...] = ()
    paths: Mapping[str, str] = field(default_factory=dict, hash=False)
