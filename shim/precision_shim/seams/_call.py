"""Call a wrapper with a ``Call`` and with the symbol's arguments that the wrapper reads."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import SeamError
from ._seam import REQUIRED, name_of, reads_of
from ._source import Symbol, look

_NAMED = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)

_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

Through = Callable[[Any, Any, "tuple[Any, ...]", "dict[str, Any]"], Any]
"""wrapt's form of a wrapper: ``(wrapped, instance, args, kwargs)``."""


@dataclass(frozen=True)
class Binding:
    """A symbol's parameters, and which of them a wrapper reads.

    Attributes:
        positional: names of the parameters that may be passed by position, without ``first``.
        positional_only: how many of ``positional`` must be passed by position.
        first: name of the parameter for the instance or the class; empty for a function.
        parameters: the names of all parameters except ``first``.
        wanted: the wrapper's parameters, each with the value to use if the caller passes no value.
    """

    target: str
    positional: tuple[str, ...]
    positional_only: int
    first: str
    parameters: frozenset[str]
    wanted: tuple[tuple[str, Any], ...]


class Call:
    """One call of a wrapped symbol; the wrapper receives this object as its first argument.

    Attributes:
        instance: what a method was called on, the class for a classmethod, else ``None``. Of a
            class- or staticmethod, a wrapper may read it only with ``unbound=True``.
    """

    def __init__(
        self, binding: Binding, wrapped: Any, instance: Any, args: Any, kwargs: Any
    ) -> None:
        self.instance = instance
        self._binding = binding
        self._wrapped = wrapped
        self._args = args
        self._kwargs = kwargs
        self._arguments: dict[str, Any] | None = None
        self._taken = False  # whether the wrapper has read .arguments and may have changed them
        self._twice: dict[str, Any] = {}

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments that the caller passed, by name, without defaults.

        A wrapper may add, change and remove entries, which ``proceed()`` passes on. Unknown keyword
        arguments and those for ``**kwargs`` are entries; ``*args`` are not, and are passed on.
        """
        self._taken = True
        return self._bound()

    @property
    def parameters(self) -> frozenset[str]:
        """Names of the parameters that the symbol has in this version."""
        return self._binding.parameters

    def proceed(self) -> Any:
        """Call the wrapped symbol with the current ``arguments``, any number of times or never.

        Arguments that the caller passed by position are passed by position, all others by name.
        """
        if not self._taken:
            return self._wrapped(*self._args, **self._kwargs)
        names, rest = self._names(), dict(self._bound())
        unnamed = self._args[len(names) :]
        by_position = len(names) if unnamed else len(self._args)
        args = []
        for name in names[: max(by_position, self._binding.positional_only)]:
            if name not in rest:
                break
            args.append(rest.pop(name))
        if unnamed and len(args) < len(names):
            raise TypeError(
                f"{self._binding.target}: a wrapper took {names[len(args)]!r} out of a call that "
                f"passes {len(unnamed)} more arguments by position"
            )
        return self._wrapped(*args, *unnamed, **rest, **self._twice)

    def _bound(self) -> dict[str, Any]:
        values = self._arguments
        if values is None:
            values = self._arguments = dict(zip(self._names(), self._args, strict=False))
            if self._kwargs:
                if not values.keys().isdisjoint(self._kwargs):  # an argument is passed twice
                    self._twice = {k: v for k, v in self._kwargs.items() if k in values}
                values.update((k, v) for k, v in self._kwargs.items() if k not in self._twice)
        return values

    def _names(self) -> tuple[str, ...]:
        binding = self._binding
        if binding.first and self.instance is None:  # Class.method(an object of another class)
            return (binding.first, *binding.positional)
        return binding.positional


def prepare(
    function: Callable[..., Any], target: str, raw: Any, in_class: bool, source: Symbol
) -> Binding:
    """Match the parameters of a wrapper, ``function``, with those of the imported symbol.

    Args:
        function: the wrapper.
        target: ``"module:attribute"`` of the symbol.
        raw: the symbol's value in its namespace; in a class it may be a descriptor.
        in_class: whether the symbol's namespace is a class.
        source: the symbol's description from its source, for parameters that a decorator hides
            behind ``*args, **kwargs``. Without a ``target``, it is read if it is needed.

    Raises:
        SeamError: the symbol lacks a parameter that the wrapper needs.
    """
    reads = reads_of(function)
    bound = in_class and not isinstance(raw, staticmethod) and hasattr(raw, "__get__")
    # Inspect the function in a class's descriptor: a bound method lacks the instance parameter.
    signature = _signature(getattr(raw, "__func__", raw) if in_class else raw)
    parameters = [given for given in signature or () if given.kind in _NAMED]
    positional = [
        parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY
    ]
    positional_only = sum(parameter.kind is parameter.POSITIONAL_ONLY for parameter in parameters)
    names = {parameter.name for parameter in parameters}
    kinds = {given.kind for given in signature or ()}
    lacking = [name for name in reads if name not in names]
    hidden = inspect.Parameter.VAR_POSITIONAL in kinds and inspect.Parameter.VAR_KEYWORD in kinds
    if not source.target and (signature is None or (lacking and not kinds.isdisjoint(_REST))):
        source = look(target)
    if signature is None or (hidden and lacking):
        starts_alike = list(source.positional[: len(positional)]) == positional
        if starts_alike or (len(positional) == int(bound)):
            positional = list(source.positional)
            names |= set(source.parameters)
    elif inspect.Parameter.VAR_KEYWORD not in kinds:
        required = [name for name in lacking if reads[name] is REQUIRED]
        if required:
            raise SeamError(f"{target} has no parameter {', '.join(map(repr, required))}")
    first = positional[0] if bound and positional else ""
    defaults = {**source.defaults, **{given.name: given.default for given in parameters}}
    return Binding(
        target=target,
        positional=tuple(positional[1:] if first else positional),
        positional_only=max(positional_only - bool(first), 0),
        first=first,
        parameters=frozenset(names - {first}),
        wanted=tuple((name, defaults.get(name, default)) for name, default in reads.items()),
    )


def _signature(function: Any) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except Exception:  # a builtin may lack a signature; another tool's object may raise an error
        return None


def through(function: Callable[..., Any], binding: Binding) -> Through:
    """Convert a wrapper to wrapt's form, ``(wrapped, instance, args, kwargs)``."""

    def named(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        call = Call(binding, wrapped, instance, args, kwargs)
        given = call._bound()
        values = {}
        for name, default in binding.wanted:
            values[name] = given.get(name, default)
            if values[name] is REQUIRED:
                if not _binds(wrapped, args, kwargs):
                    wrapped(*args, **kwargs)  # raises a TypeError before its code runs
                raise TypeError(
                    f"{binding.target} was called without {name!r}, which {name_of(function)} reads"
                )
        return function(call, **values)

    return named


def _binds(function: Any, args: Any, kwargs: Any) -> bool:
    try:
        inspect.signature(function, follow_wrapped=False).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # a builtin may lack a signature
        pass
    return True


def around(
    function: Callable[..., Any],
    method: Callable[..., Any],
    instance: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    positional: tuple[str, ...] = (),
) -> Any:
    """Call a bound method through a wrapper, as if a seam had patched the method.

    It is for a mixin that precedes a framework's class among the bases. ``function`` is the
    wrapper, ``method`` is bound to ``instance``; ``positional``: its first parameters, if hidden.
    """
    name = f"{type(instance).__module__}:{type(instance).__qualname__}"
    source = Symbol(name, parameters=positional, positional=positional)
    binding = prepare(function, name, method, False, source)
    return through(function, binding)(method, instance, args, kwargs)
