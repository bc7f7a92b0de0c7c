"""What stands in a wrapped symbol's place: wrapt's wrapper, picklable by reference and marked.

Ray pickles functions and bound methods with cloudpickle, which cannot pickle wrapt's wrappers
(``NotImplementedError``). Ours pickle as "the symbol of that name", so that the other process
gets its own, patched or not as that process is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import wrapt


class _BoundSeam(wrapt.BoundFunctionWrapper):  # type: ignore[type-arg]
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # cloudpickle sends what calls itself a function, and is not the very object at its name,
        # by value: of ``Class.method`` the function beneath the wrapper would arrive.
        wrapped = self.__wrapped__
        return _BoundSeam if getattr(wrapped, "__self__", None) is None else type(wrapped)

    def __copy__(self) -> _BoundSeam:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        make, of = self.__reduce_ex__(2)
        return self if make is resolve else make(*copy.deepcopy(of, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return self.__reduce_ex__(2)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        target = self._self_parent._self_target
        owner = getattr(self.__wrapped__, "__self__", None)  # of a classmethod: the class it is on
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
