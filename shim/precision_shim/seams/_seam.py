"""Declare a seam: a decorator on the function that wraps a symbol of a framework.

A wrapped symbol must have all parameters of the marked function, except the first.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import CodeType, ModuleType
from typing import Any, ParamSpec, Protocol, TypeVar

from ..errors import SeamError
from ._source import Symbol

NativeProbe = Callable[[Symbol, Any], "str | None"]
"""Returns a sentence on how the framework has the feature itself; ``None`` if it has not."""

Function = TypeVar("Function", bound=Callable[..., Any])
Takes = ParamSpec("Takes")

REQUIRED = inspect.Parameter.empty
"""Value in ``Seam.reads`` for parameters without a default; a symbol must have these parameters."""

_MARK = "_precision_shim_seams"
_CONDITION = re.compile(r"[\w.]+(:[\w.]+( mentions \w+)?)?")


@dataclass(frozen=True, kw_only=True)
class _Fields:
    """The fields of a ``Seam`` that ``seam(...)`` accepts by name; ``Seam`` documents them."""

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
    """The declaration that the shim patches one symbol of a framework for one feature.

    An adapter calls ``Seam(...)`` itself for a feature of the framework, without a wrapper, and for
    a function that wraps different symbols in different frameworks.

    Attributes:
        target: the symbol where it is *defined*: ``"module:name"`` or ``"module:Class.method"``.
        feature: the feature that needs the seam.
        wrapper: ``function(call, ...)``, see ``Call``; ``None`` if the framework has the feature.
        why: why the shim patches this symbol and not another.
        upstream: link to the discussion upstream, or empty.
        delete_when: when this seam can be deleted.
        group: name shared by seams of one feature that are patched together or not at all.
        relies_on: identifiers that the symbol's source (a method: its class's) must contain.
        aliases: ``"module:attribute"`` of copies by ``from ... import``, which are replaced too.
        native: function that tests whether the installed framework has the feature itself.
        optional: whether a missing module makes the seam ``absent`` instead of ``refused``.
        refusal: why the feature is impossible here; a call reports it, in strict mode as an error.
        replaces: whether ``wrapper`` is called with the symbol's value and returns a replacement,
            which is in place until ``uninstall()``; for a symbol that is used without being called,
            such as a class that a decorator has turned into another object.
        only_if: conditions that the source must meet. ``"module"`` and ``"module:attribute"`` must
            exist; for ``"module:attribute mentions name"``, the symbol's source must contain
            ``name``. Conditions are tested at the framework's import, never earlier.
        unless: conditions in the form of ``only_if``; the seam is left out if any of them is met.
        unbound: must be true if ``wrapper`` reads ``call.instance`` of a class- or staticmethod;
            else the seam is refused, because upstream may have changed a method into one.
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
                f"{self.feature} itself, and needs a native= probe."
            )
        self.reads  # noqa: B018  # raises an error now if the wrapper's signature is invalid

    @property
    def module(self) -> str:
        """Dotted name of the module that defines the symbol."""
        return self.target.partition(":")[0]

    @property
    def attribute(self) -> str:
        """Dotted path of the symbol within its module."""
        return self.target.partition(":")[2]

    @property
    def name(self) -> str:
        """``"module:function"`` of the wrapper (without a wrapper: of ``native``), for messages."""
        return name_of(self.wrapper or self.native or self.target)

    @property
    def key(self) -> object:
        """Equal for seams with one wrapper, also if only one of them is from a record."""
        return self.wrapper if "<" in self.name else self.name  # made in a function, or a lambda

    @cached_property
    def reads(self) -> dict[str, Any]:
        """The wrapper's parameters after the first, each with its default or ``REQUIRED``."""
        return {} if self.wrapper is None or self.replaces else reads_of(self.wrapper)

    def fits(self, kind: str) -> bool:
        """Whether the wrapper can wrap a symbol of this kind; see ``Symbol.kind``.

        A plain wrapper of a coroutine or generator would return before the wrapped body runs.
        """
        if self.wrapper is None or self.replaces:
            return True
        expected, reads_instance = kind_of(self.wrapper)
        if kind in ("staticmethod", "classmethod"):
            return self.unbound or not reads_instance
        return kind == expected  # no function(call, ...) wraps a class, property or context manager

    @property
    def parameters(self) -> tuple[str, ...]:
        """Parameters that the symbol must have, because the wrapper gives them no default."""
        return tuple(name for name, default in self.reads.items() if default is REQUIRED)


@dataclass(frozen=True)
class _Declaration(_Fields):
    """The arguments of ``seam(...)``, declared here for type checkers and ``help(seam)``."""

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

    The function's first parameter is the ``Call``. Each further parameter is named like a parameter
    of the symbol, and receives the caller's argument or the symbol's default. A parameter without a
    default must exist in every version of the symbol. Several ``@seam`` on one function declare
    several seams; one declaration can cover several symbols that differ little::

        @seam(
            feature="audit",
            at=["pkg.actor:Actor.step", {"target": "pkg.critic:Critic.step", "optional": True}],
            why="both step here",
        )

    Args:
        target: see ``Seam``.
        feature: the feature that needs the seam, or several features, which share one wrapper.
        at: several symbols: targets, or mappings of arguments of ``seam`` that differ for a symbol.
        fields: see ``Seam``.

    Raises:
        SeamError: the declaration is invalid; the message names the function.
    """
    shared = {"target": target, "feature": feature, **fields}
    places = [{"target": place} if isinstance(place, str) else place for place in at] or [{}]

    def declare(function: Function) -> Function:
        records: list[Seam] = []
        for given in ({**shared, **place} for place in places):
            _check(function, given)
            features = given.pop("feature")
            features = (features,) if isinstance(features, str) else features
            records += [Seam(feature=name, wrapper=function, **given) for name in features]
        marks: list[Seam] = vars(function).setdefault(_MARK, [])
        marks[:0] = records  # Python applies the lowest decorator first
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
    """Make an adapter's table of seams, of which the first of a target is the innermost wrapper.

    Args:
        sources: modules (their marked functions, in order of definition), functions, ``Seam``
            objects, or lists of these.

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


def kind_of(function: Any) -> tuple[str, bool]:
    """Return the ``Symbol.kind`` that a wrapper fits, and whether it may read ``call.instance``."""
    if hasattr(function, "kind"):  # from a record
        return tuple(function.kind)
    code = getattr(function, "__code__", None)
    kind = "generator" if inspect.isgeneratorfunction(function) else ""
    kind = "coroutine" if inspect.iscoroutinefunction(function) else kind
    return kind, code is not None and _mentions(code, "instance")


def _mentions(code: CodeType, name: str) -> bool:
    return name in code.co_names or any(
        _mentions(const, name) for const in code.co_consts if isinstance(const, CodeType)
    )


def name_of(thing: Any) -> str:
    """Return ``"module:function"`` of a function, for messages."""
    if isinstance(thing, str):
        return thing
    module = getattr(thing, "__module__", "?")
    return f"{module}:{getattr(thing, '__qualname__', repr(thing))}"


def reads_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return a wrapper's parameters after the first, each with its default or ``REQUIRED``.

    Raises:
        SeamError: a parameter cannot be passed by name, or the parameter for the call is missing.
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
