"""The object that replaces a wrapped symbol: wrapt's wrapper with our mark, pickled by name.

cloudpickle, and so Ray, cannot pickle wrapt's wrappers; the receiver looks the symbol up by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pkgutil import resolve_name
from types import FunctionType
from typing import Any

import wrapt


class _BoundSeam(wrapt.BoundFunctionWrapper):  # type: ignore[type-arg]
    def __copy__(self) -> _BoundSeam:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        make, of = self.__reduce_ex__(2)
        return self if make is resolve_name else make(*copy.deepcopy(of, memo))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        target = self._self_parent._self_target
        owner = getattr(self.__wrapped__, "__self__", None)  # a classmethod's class
        if owner is None:
            return resolve_name, (target,)
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
        # ``Class.method`` must be the same object at each access, as a plain function is: if its
        # name refers to another object, cloudpickle pickles it by value, without our wrapper.
        if self._self_unbound is None:
            self._self_unbound = super().__get__(None, self._definer(owner))
        return self._self_unbound

    def _definer(self, owner: Any) -> Any:
        # For ``Class.method(obj)``, wrapt treats ``obj`` as ``self`` only if ``obj`` is an instance
        # of ``owner``. Several subclasses may access one inherited wrapper.
        for kind in getattr(owner, "__mro__", ()):
            if any(value is self for value in list(vars(kind).values())):
                return kind
        return owner  # another tool's wrapper called __get__() with the defining class as ``owner``

    def __copy__(self) -> SeamWrapper:
        return self  # like a plain function, which copy.copy() does not copy

    def __deepcopy__(self, memo: Any) -> SeamWrapper:
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return resolve_name, (self._self_target,)
