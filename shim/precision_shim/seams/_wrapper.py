"""What stands in a wrapped symbol's place: wrapt's wrapper, picklable by reference and marked.

Ray pickles functions and bound methods with cloudpickle, which cannot pickle wrapt's wrappers
(``NotImplementedError``). Ours pickle as "the symbol of that name", so that the other process
gets its own, patched or not as that process is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import FunctionType
from typing import Any

import wrapt


class _BoundSeam(wrapt.BoundFunctionWrapper):  # type: ignore[type-arg]
    def __copy__(self) -> _BoundSeam:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        make, of = self.__reduce_ex__(2)
        return self if make is resolve else make(*copy.deepcopy(of, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return self.__reduce_ex__(2)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        target = self._self_parent._self_target
        owner = getattr(self.__wrapped__, "__self__", None)  # a classmethod's class
        if owner is None:
            return resolve, (target,)
        return getattr, (owner, target.rpartition(".")[2])


class SeamWrapper(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """A wrapped symbol; ``_self_precision_shim`` marks it as ours and names the adapter."""

    __bound_function_wrapper__ = _BoundSeam

    def __init__(
        self,
        wrapped: Any,
        wrapper: Callable[..., Any],
        *,
        target: str,
        owner: str,
        enabled: Callable[[], bool],
    ) -> None:
        super().__init__(wrapped, wrapper, enabled=enabled)
        self._self_target = target
        self._self_precision_shim = owner
        self._self_unbound: Any = None

    def __get__(self, instance: Any, owner: Any) -> Any:  # type: ignore[override]
        static = isinstance(self.__wrapped__, staticmethod)
        plain = instance is None and isinstance(self.__wrapped__, FunctionType)
        if not (static or plain):
            return super().__get__(instance, owner)
        # ``Class.method`` is one object at each access, as a plain function is. Ray lists an
        # actor's methods by what calls itself a function, and cloudpickle sends such a one by
        # value, beneath the wrapper, unless it is the very object at its name.
        if self._self_unbound is None:
            self._self_unbound = super().__get__(None, self._definer(owner))
        return self._self_unbound

    def _definer(self, owner: Any) -> Any:
        # wrapt takes the first argument for the instance only if it is one of the owner's, and the
        # first to ask may be a sibling of the class whose instance comes next.
        for kind in getattr(owner, "__mro__", ()):
            if any(value is self for value in vars(kind).values()):
                return kind
        return owner  # beneath another wrapper, which has passed the definer on

    def __copy__(self) -> SeamWrapper:
        return self  # as copy does with the plain function in whose place it stands

    def __deepcopy__(self, memo: Any) -> SeamWrapper:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return self.__reduce_ex__(2)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return resolve, (self._self_target,)


def resolve(target: str) -> Any:
    """Import ``"module:dotted.attribute"`` and return the object."""
    import importlib

    module, _, attribute = target.partition(":")
    found: Any = importlib.import_module(module)
    for part in attribute.split(".") if attribute else ():
        found = getattr(found, part)
    return found
