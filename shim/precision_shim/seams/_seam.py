"""What an adapter declares: a seam, once, on the function that stands there.

``seam(...)`` marks a function, as pluggy's ``hookimpl`` does; ``collect(...)`` makes an adapter's
table of the marks. The function's own parameters are what the symbol must have, so nothing about
them is said twice.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from ..errors import SeamError
from ._source import Symbol

if TYPE_CHECKING:
    from ..process.framework import Checkpoints, Framework

NativeProbe = Callable[[Symbol, Any], "str | None"]
"""Looks at a seam's symbol and at the settings; returns why the framework does the feature
itself, or ``None`` when it does not."""

Function = TypeVar("Function", bound=Callable[..., Any])
Takes = ParamSpec("Takes")

REQUIRED = inspect.Parameter.empty
"""In the place of a default: the symbol must have this parameter."""

_MARK = "_precision_shim_seams"
_CONDITION = re.compile(r"[\w.]+(:[\w.]+( mentions \w+)?)?")


@dataclass(frozen=True, kw_only=True)
class _Fields:
    """What ``seam(...)`` takes by name and a ``Seam`` has, which says what each of them is."""

    why: str
    upstream: str = ""
    delete_when: str = ""
    group: str = ""
    relies_on: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    native: NativeProbe | None = None
    optional: bool = False
    refusal: str = ""
    replaces: bool = False
    only_if: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    unbound: bool = False


@dataclass(frozen=True)
class Seam(_Fields):
    """One place of a framework where the shim enters, for one feature.

    Installer, uninstaller, status, documentation and tests all read these records. ``seam`` makes
    them; a record is written out only where there is no function to mark: of what the framework
    does itself, and of a function that several frameworks have at places of their own.

    Attributes:
        target: ``"module:attribute"``, in the module that *defines* the symbol; names of a class
            body are joined with a dot (``"pkg.mod:Class.method"``).
        feature: the feature that needs the seam.
        wrapper: the function that stands there: ``function(call, ...)``, see ``Call``. ``None``:
            a record of what the framework does itself.
        why: why the shim enters here and not elsewhere.
        upstream: link to the discussion upstream, where there is one.
        delete_when: when this record can be deleted.
        group: name of the seams that are patched together or not at all, within a feature.
        relies_on: identifiers that the symbol's source (for a method: its class's) must contain;
            the facts that the wrapper builds on.
        aliases: ``"module:attribute"`` names that other modules bound by ``from ... import``; a
            late install reaches them, as long as they still hold the original.
        native: tells whether the framework does the feature itself here.
        optional: an absent module makes the seam ``absent``, not ``refused``.
        refusal: why the feature cannot be had here. Such a seam's wrapper only says so (or
            raises, in strict mode) when the framework gets there.
        replaces: ``wrapper`` gets what the symbol holds and returns what is to stand there until
            the shim is taken out. For a symbol that callers do not call but build on, such as a
            class that a decorator has turned into something else.
        only_if: what must be there for the seam to be one of this version's: ``"module"``,
            ``"module:attribute"``, or ``"module:attribute mentions name"`` for an identifier in
            the symbol's source. Where one of them is not there, the seam is in no status and
            nobody misses it. Read from source when the framework is imported, never earlier.
        unless: the same of what must not be there; one that is there is enough.
        unbound: whether the symbol is a classmethod or a staticmethod, and a ``wrapper`` that
            reads ``call.instance`` knows that it is the class, or ``None``. Without it such a
            wrapper is refused there: upstream has made one of a method.
    """

    target: str
    feature: str
    wrapper: Callable[..., Any] | None

    def __post_init__(self) -> None:
        for text in (self.target, *self.aliases):
            module, colon, attribute = text.partition(":")
            if not (module and colon and attribute) or ":" in attribute:
                raise SeamError(
                    f"{self.name}: {text!r} is no place; allowed: 'module:attribute' and "
                    "'module:Class.method'. Correct it in the function's seam(...)."
                )
        for text in (*self.only_if, *self.unless):
            if not _CONDITION.fullmatch(text):
                raise SeamError(
                    f"{self.name}: {text!r} is no condition; allowed in only_if and unless: "
                    "'module', 'module:attribute' and 'module:attribute mentions name'. Correct "
                    "it in the function's seam(...)."
                )
        for one in (self.wrapper, self.native):
            if one is not None and not callable(one):
                raise SeamError(f"{self.target}: {one!r} is no function; allowed: the function.")
        if self.wrapper is None and self.native is None:
            raise SeamError(
                f"{self.name}: a record without a wrapper says that the framework does "
                f"{self.feature} itself, and needs a native= probe that tells."
            )
        self.reads  # noqa: B018  # a signature that cannot be bound is an error now, not later

    @property
    def module(self) -> str:
        """Dotted name of the defining module."""
        return self.target.partition(":")[0]

    @property
    def attribute(self) -> str:
        """Dotted path of the symbol within its module."""
        return self.target.partition(":")[2]

    @property
    def name(self) -> str:
        """``"module:function"`` of the wrapper (of the probe where there is none), for messages."""
        return name_of(self.wrapper or self.native or self.target)

    @cached_property
    def reads(self) -> dict[str, Any]:
        """The parameters that the wrapper names, each with its default or ``REQUIRED``."""
        return {} if self.wrapper is None or self.replaces else reads_of(self.wrapper)

    def fits(self, kind: str) -> bool:
        """Whether the wrapper can stand at a symbol that is no plain function; see ``Symbol.kind``.

        A plain wrapper around a coroutine or a generator would return before its body has run.
        """
        if self.wrapper is None or self.replaces:
            return True
        if kind in ("staticmethod", "classmethod"):
            code = getattr(self.wrapper, "__code__", None)
            return self.unbound or code is None or not _mentions(code, "instance")
        if kind == "coroutine":
            return inspect.iscoroutinefunction(self.wrapper)
        if kind == "generator":
            return inspect.isgeneratorfunction(self.wrapper)
        return False  # a class or a property is called by nobody here; a context manager is entered

    @property
    def parameters(self) -> tuple[str, ...]:
        """Parameters that the symbol must have: those that the wrapper names without a default."""
        return tuple(name for name, default in self.reads.items() if default is REQUIRED)


@dataclass(frozen=True)
class Adapter:
    """A framework, as the shim sees it.

    Attributes:
        framework: the name that users write, such as ``"verl"``.
        distribution: the name of its distribution, for its version.
        packages: top-level packages whose import shows that the framework is in use.
        tested: versions that the test environments pin.
        seams: the table of seams, as ``collect`` makes it; of several on one target the first is
            the innermost wrapper.
        effects: ``"module:attribute"`` targets where a feature first takes effect (an optimizer
            or a DDP is built). In strict mode a fault is raised there, and nowhere earlier.
        paths: what users call the paths that the groups serve, such as ``{"fsdp": "FSDP
            engine"}``; a group that is not here is shown by its own name. A name that ends in
            brackets, such as ``"FSDP engine (metrics)"``, is a path that only serves others:
            ``str(status())`` shows it where it was refused, and else leaves it to ``details()``.
        probes: names of modules whose functions ask whether what the rules assume of the
            framework still holds; imported when somebody asks.
        plan: ``"module:function"`` from a launch line to the models of its job, for
            ``precision-shim plan``; empty where the adapter plans none.
        checkpoints: how the framework's checkpoints are called and what foretells a resume, for
            ``precision-shim checkpoint``.
        audit_readers: top-level package of an optimizer's class to the ``"module:function"`` that
            reads such optimizers for the audit, where torch's own reader does not fit.
        checkpoint_readers: kind of a checkpoint's files to what sorts their tensors.
    """

    framework: str
    distribution: str
    packages: tuple[str, ...]
    tested: tuple[str, ...]
    seams: tuple[Seam, ...]
    effects: tuple[str, ...] = ()
    paths: Mapping[str, str] = field(default_factory=dict, hash=False)
    probes: tuple[str, ...] = ()
    plan: str = ""
    checkpoints: Checkpoints | None = None
    audit_readers: Mapping[str, str] = field(default_factory=dict, hash=False)
    checkpoint_readers: Mapping[str, str] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, record: Framework, *, seams: tuple[Seam, ...], paths: Mapping[str, str]) -> Adapter:
        """An adapter of a framework that has a record: the record says all but seams and paths."""
        said: dict[str, Any] = {**vars(record), "seams": seams, "paths": paths}
        del said["adapter"]
        return cls(**said)

    def check(self, features: Iterable[str]) -> None:
        """Hold the table against the names of the features that there are.

        Raises:
            SeamError: names the function whose feature is none of them.
        """
        allowed = tuple(features)
        for one in self.seams:
            if one.feature not in allowed:
                raise SeamError(
                    f"{self.framework}: {one.name} is declared for the feature {one.feature!r}; "
                    f"allowed: {', '.join(allowed)}. Correct the function's seam(...)."
                )


@dataclass(frozen=True)
class _Declaration(_Fields):
    """The arguments of ``seam(...)``: a checker and ``help(seam)`` read them here."""

    target: str = ""
    feature: str | tuple[str, ...] = ()
    why: str = field(default="", kw_only=True)
    at: Iterable[str | Mapping[str, Any]] = field(default=(), kw_only=True)


_TAKES = tuple(inspect.signature(_Declaration).parameters)


class _Decorator(Protocol):
    def __call__(self, function: Function, /) -> Function: ...


def _takes(
    kind: Callable[Takes, Any],
) -> Callable[[Callable[..., _Decorator]], Callable[Takes, _Decorator]]:
    def typed(function: Callable[..., _Decorator]) -> Callable[Takes, _Decorator]:
        takes = inspect.signature(kind).replace(return_annotation=_Decorator)
        function.__signature__ = takes  # type: ignore[attr-defined]
        return function

    return typed


@_takes(_Declaration)
def seam(target: str = "", feature: Any = (), *, at: Any = (), **fields: Any) -> _Decorator:
    """Declare that a function stands at a symbol of a framework.

    The function's first parameter is the ``Call``. Each further one has the name of a parameter
    of the symbol and gets what the caller passed for it, or the symbol's default; the symbol must
    have it, unless the function has a default for versions that have not. Several of these on one
    function are several places; the function itself stays what it is.

    Several places that differ in little are one declaration::

        @seam(
            feature="audit",
            at=["pkg.actor:Actor.step", {"target": "pkg.critic:Critic.step", "optional": True}],
            why="both step here",
        )

    The order in a module is the order of the layers: of two functions on one target the one that is
    defined first is beneath.

    Args:
        target: see ``Seam``.
        feature: the feature that needs the function there, or several; it wraps once.
        at: several places, in the order of their records: each a target, or a mapping of what is
            said of this place alone, by the names of these arguments. What it does not say it has
            from the others.
        fields: see ``Seam``.

    Raises:
        SeamError: what is declared makes no sense; names the function.
    """
    shared = {"target": target, "feature": feature, **fields}
    places = [{"target": one} if isinstance(one, str) else one for one in at] or [{}]

    def declare(function: Function) -> Function:
        records: list[Seam] = []
        for given in ({**shared, **own} for own in places):
            _check(function, given)
            features = given.pop("feature")
            features = (features,) if isinstance(features, str) else features
            records += [Seam(feature=one, wrapper=function, **given) for one in features]
        marks: list[Seam] = vars(function).setdefault(_MARK, [])
        marks[:0] = records  # Python applies decorators from the lowest up
        return function

    return declare


def _check(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    unknown = [key for key in given if key not in _TAKES or key == "at"]
    if unknown:
        raise SeamError(
            f"{name_of(function)}: seam(...) has no {', '.join(map(repr, unknown))}; allowed: "
            f"{', '.join(_TAKES)}."
        )
    missing = [key for key in ("feature", "why") if not given.get(key)]
    if missing:
        raise SeamError(
            f"{name_of(function)}: seam(...) needs {' and '.join(missing)}, given once or for each "
            "place in at=[...]."
        )


_Source = ModuleType | Callable[..., Any] | Seam | Iterable[Any]


def collect(*sources: _Source) -> tuple[Seam, ...]:
    """Make a table of seams.

    Args:
        sources: modules, for what is declared in them, in the order of its definition; functions;
            records; or lists of these. Of several on one target the first is the innermost.

    Raises:
        SeamError: a module or a function declares nothing.
    """
    found: list[Seam] = []
    for source in sources:
        if isinstance(source, Seam):
            found.append(source)
        elif isinstance(source, ModuleType):
            inside = [
                value
                for value in vars(source).values()
                if inspect.isfunction(value)
                and value.__module__ == source.__name__
                and _MARK in vars(value)
            ]
            if not inside:
                raise SeamError(f"{source.__name__} declares no seam: no function has a seam(...).")
            found += collect(*inside)
        elif callable(source):
            marks = getattr(source, _MARK, None)
            if marks is None:
                raise SeamError(f"{name_of(source)} declares no seam: it has no seam(...).")
            found += marks
        else:
            found += collect(*source)
    return tuple(found)


def _mentions(code: CodeType, name: str) -> bool:
    """Whether code reads an attribute of this name, functions within it included."""
    return name in code.co_names or any(
        _mentions(one, name) for one in code.co_consts if isinstance(one, CodeType)
    )


def name_of(thing: Any) -> str:
    """``"module:function"``, for messages."""
    if isinstance(thing, str):
        return thing
    module = getattr(thing, "__module__", "?")
    return f"{module}:{getattr(thing, '__qualname__', repr(thing))}"


def reads_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The parameters of a symbol that a wrapper names, each with its default or ``REQUIRED``.

    Raises:
        SeamError: the wrapper takes no call, or takes what has no name.
    """
    first, *others = inspect.signature(function).parameters.values() or (None,)
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if first is None or any(one.kind not in named for one in (first, *others)):
        raise SeamError(
            f"{name_of(function)}: a wrapper is function(call, ...): first the call, then "
            "parameters of the symbol by their names, no *args and no **kwargs "
            "(call.arguments has what else was passed)."
        )
    return {one.name: one.default for one in others}
