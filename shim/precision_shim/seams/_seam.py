"""What an adapter declares: a seam, once, on the function that wraps the framework's symbol.

``seam(...)`` marks a function, as pluggy's ``hookimpl`` does; ``collect(...)`` makes an adapter's
table from the marks. The symbol must have the parameters that the function names, so no list
repeats them.
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
"""Stands for a missing default: the symbol must have the parameter."""

_MARK = "_precision_shim_seams"
_CONDITION = re.compile(r"[\w.]+(:[\w.]+( mentions \w+)?)?")


@dataclass(frozen=True, kw_only=True)
class _Fields:
    """The fields of a ``Seam`` that ``seam(...)`` takes by name; ``Seam`` documents them."""

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
    them. An adapter writes a record out only where it has no function to mark: for what the
    framework does itself, and for a function that wraps different symbols in different frameworks.

    Attributes:
        target: ``"module:attribute"``, in the module that *defines* the symbol; names of a class
            body are joined with a dot (``"pkg.mod:Class.method"``).
        feature: the feature that needs the seam.
        wrapper: the function that wraps the symbol: ``function(call, ...)``, see ``Call``.
            ``None``: a record of what the framework does itself.
        why: why the shim enters here and not elsewhere.
        upstream: link to the discussion upstream, where there is one.
        delete_when: when this record can be deleted.
        group: name shared by seams of one feature that are patched together or not at all.
        relies_on: identifiers that the symbol's source (for a method: its class's) must contain,
            because the wrapper relies on them.
        aliases: ``"module:attribute"`` names that other modules bound by ``from ... import``; a
            late install replaces them, as long as they still hold the original.
        native: tells whether the framework does the feature itself here.
        optional: an absent module makes the seam ``absent``, not ``refused``.
        refusal: why the feature is impossible here. Such a seam's wrapper only says so (or raises,
            in strict mode) when the framework calls the symbol.
        replaces: ``wrapper`` gets the symbol's value and returns the value that replaces it until
            the shim is taken out. For a symbol that callers do not call but build on, such as a
            class that a decorator has turned into something else.
        only_if: what the source must have for the seam to belong to this version: ``"module"``,
            ``"module:attribute"``, or ``"module:attribute mentions name"`` for an identifier in
            the symbol's source. Where one of these is missing, no status shows the seam, unless
            its symbol is gone from all its places. Read when the framework is imported, never
            earlier.
        unless: the same for what the source must not have; one match leaves the seam out.
        unbound: set it where the symbol is a classmethod or a staticmethod and ``wrapper`` reads
            ``call.instance``, which is then the class or ``None``. Without it the check refuses
            such a wrapper there, because upstream may have turned a method into one of these.
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
        for function in (self.wrapper, self.native):
            if function is not None and not callable(function):
                raise SeamError(
                    f"{self.target}: {function!r} is no function; allowed: the function."
                )
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
        """Whether the wrapper can wrap a symbol of this kind; see ``Symbol.kind``.

        A plain wrapper would return before the body of a wrapped coroutine or generator runs; and
        nobody would await, or iterate over, what one of these returns around a plain function.
        """
        if self.wrapper is None or self.replaces:
            return True
        if kind == "":
            return not (
                inspect.iscoroutinefunction(self.wrapper)
                or inspect.isgeneratorfunction(self.wrapper)
            )
        if kind in ("staticmethod", "classmethod"):
            code = getattr(self.wrapper, "__code__", None)
            return self.unbound or code is None or not _mentions(code, "instance")
        if kind == "coroutine":
            return inspect.iscoroutinefunction(self.wrapper)
        if kind == "generator":
            return inspect.isgeneratorfunction(self.wrapper)
        return False  # a wrapper of calls fits no class, property or context manager

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
        paths: group to what users call the path that it serves, such as ``{"fsdp": "FSDP
            engine"}``; a group without an entry is shown by its own name. A name that ends in
            brackets, such as ``"FSDP engine (metrics)"``, is a path that only serves other paths:
            ``str(status())`` shows it if it was refused or no other path is there, ``details()``
            always.
        probes: names of modules whose functions test whether the framework behaves as the rules
            assume; imported only to run these tests.
        plan: ``"module:function"`` that reads the models of a job from its launch line, for
            ``precision-shim plan``; empty where the adapter plans none.
        checkpoints: how the framework names its checkpoints and which functions predict a resume,
            for ``precision-shim checkpoint``.
        audit_readers: top-level package of an optimizer's class to the ``"module:function"`` that
            reads such optimizers for the audit, where torch's own reader does not fit.
        checkpoint_readers: kind of a checkpoint's files to the ``"module:function"`` that sorts
            their tensors.
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
        """Make an adapter from a framework's record, which has every field but seams and paths."""
        said: dict[str, Any] = {**vars(record), "seams": seams, "paths": paths}
        del said["adapter"], said["by_name"]
        return cls(**said)

    def check(self, features: Iterable[str]) -> None:
        """Check that every seam of the table is for a known feature.

        Raises:
            SeamError: a seam's feature is unknown; the message names its function.
        """
        allowed = tuple(features)
        for seam in self.seams:
            if seam.feature not in allowed:
                raise SeamError(
                    f"{self.framework}: {seam.name} is declared for the feature {seam.feature!r}; "
                    f"allowed: {', '.join(allowed)}. Correct the function's seam(...)."
                )


@dataclass(frozen=True)
class _Declaration(_Fields):
    """The arguments of ``seam(...)``: type checkers and ``help(seam)`` read them here."""

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
    """Declare that a function wraps a symbol of a framework.

    The function's first parameter is the ``Call``. Each further parameter has the name of one of
    the symbol's parameters and gets the caller's argument, or the symbol's default. The symbol must
    have that parameter, unless the function gives it a default for versions without it. Several
    ``@seam`` on one function declare several places; the function itself is unchanged.

    One declaration can cover several places that differ little::

        @seam(
            feature="audit",
            at=["pkg.actor:Actor.step", {"target": "pkg.critic:Critic.step", "optional": True}],
            why="both step here",
        )

    The order in a module is the order of the layers: of two functions on one target the one that is
    defined first is the inner layer.

    Args:
        target: see ``Seam``.
        feature: the feature that needs the seam, or several features, which share one wrapper.
        at: several places, in the order of their records: each a target, or a mapping from names
            of these arguments to values for this place alone. Every place takes the arguments that
            its mapping lacks from the declaration.
        fields: see ``Seam``.

    Raises:
        SeamError: the declaration makes no sense; the message names the function.
    """
    shared = {"target": target, "feature": feature, **fields}
    places = [{"target": place} if isinstance(place, str) else place for place in at] or [{}]

    def declare(function: Function) -> Function:
        records: list[Seam] = []
        for given in ({**shared, **own} for own in places):
            _check(function, given)
            features = given.pop("feature")
            features = (features,) if isinstance(features, str) else features
            records += [Seam(feature=name, wrapper=function, **given) for name in features]
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
        sources: modules (all functions marked in them, in the order of definition), functions,
            records, or lists of these. Of several seams on one target the first is the innermost.

    Raises:
        SeamError: a module or a function declares no seam.
    """
    seams: list[Seam] = []
    for source in sources:
        if isinstance(source, Seam):
            seams.append(source)
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
            seams += collect(*inside)
        elif callable(source):
            marks = getattr(source, _MARK, None)
            if marks is None:
                raise SeamError(f"{name_of(source)} declares no seam: it has no seam(...).")
            seams += marks
        else:
            seams += collect(*source)
    return tuple(seams)


def _mentions(code: CodeType, name: str) -> bool:
    """Whether code reads an attribute of this name, functions within it included."""
    return name in code.co_names or any(
        _mentions(const, name) for const in code.co_consts if isinstance(const, CodeType)
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
        SeamError: the wrapper has no parameter for the call, or one that cannot be passed by name.
    """
    first, *others = inspect.signature(function).parameters.values() or (None,)
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if first is None or any(other.kind not in named for other in (first, *others)):
        raise SeamError(
            f"{name_of(function)}: a wrapper is function(call, ...): first the call, then "
            "parameters of the symbol by their names, no *args and no **kwargs "
            "(call.arguments has what else was passed)."
        )
    return {other.name: other.default for other in others}
