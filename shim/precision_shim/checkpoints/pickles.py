"""What a pickle describes, as plain data: nothing is imported, nothing is called.

``pickletools`` tells the operations of a pickle apart; here they are carried out on plain data
alone. What a pickle names becomes a ``Name``, what it would call becomes a ``Made`` that was not
made.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from ..errors import CheckpointUnreadableError

__all__ = ["Made", "Name", "Persistent", "names_in", "read_pickle"]


@dataclass(frozen=True)
class Name:
    """What a pickle would import: ``"torch.float32"``."""

    path: str


@dataclass(frozen=True)
class Persistent:
    """What lies outside the pickle, by the label that the pickle has for it."""

    label: Any


@dataclass(eq=False)
class Made:
    """An object that a pickle would make.

    Attributes:
        by: what it would call.
        arguments: with what.
        state: what it would then set: a class's fields, for one that has them.
        items: what it would put in by key.
        members: what it would append.
    """

    by: Any
    arguments: tuple[Any, ...]
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)
    members: list[Any] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """The path of what it would call; empty where that is no name."""
        return self.by.path if isinstance(self.by, Name) else ""

    def get(self, name: str, default: Any = None) -> Any:
        """A field of its state."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


class _Mark:
    pass


_MARK = _Mark()

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set}
_VALUES = frozenset(
    [
        "INT",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG",
        "LONG1",
        "LONG4",
        "FLOAT",
        "BINFLOAT",
        "STRING",
        "BINSTRING",
        "SHORT_BINSTRING",
        "BINBYTES",
        "SHORT_BINBYTES",
        "BINBYTES8",
        "BYTEARRAY8",
        "UNICODE",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE8",
    ]
)
_PUT = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_GET = frozenset({"GET", "BINGET", "LONG_BINGET"})
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_NOTHING = frozenset({"PROTO", "FRAME"})
_PLAIN = {
    "torch.Size": tuple,
    "collections.OrderedDict": dict,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.tuple": tuple,
    "builtins.list": list,
}
"""What plain data stand for. Only these are made, by ``_plain``; nothing is looked up by name."""


def read_pickle(source: bytes | IO[bytes], where: str) -> Any:
    """Read the first pickle of a file.

    Args:
        source: its bytes, or an open file.
        where: the file, for messages.

    Raises:
        CheckpointUnreadableError: it is no whole pickle.
    """
    try:
        return _Machine().run(source)
    except CheckpointUnreadableError:
        raise
    except RecursionError:
        reason = "it is nested too deeply"
    except MemoryError:
        reason = "it asks for more memory than there is"
    except Exception as error:  # whatever a damaged file makes of plain data
        reason = " ".join(str(error).split()) or type(error).__name__
    raise CheckpointUnreadableError(f"{where}: no whole pickle ({reason[:120]}).")


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, source: bytes | IO[bytes]) -> Any:
        for operation, argument, _ in pickletools.genops(source):
            if operation.name == "STOP":
                (result,) = self.stack
                return result
            self._do(operation.name, argument)
        raise ValueError("it has no end")

    def _do(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in _TUPLES:
            count = _TUPLES[name]
            stack.append(tuple(self._pop(count)))
        elif name == "MARK":
            stack.append(_MARK)
        elif name in _PUT:
            self.memo[int(argument)] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in _GET:
            stack.append(self.memo[int(argument)])
        elif name not in _NOTHING:
            method = getattr(self, f"_{name.lower()}", None)
            if method is None:
                raise ValueError(f"it has the operation {name}, which no checkpoint needs")
            method(argument)

    def _pop(self, count: int) -> list[Any]:
        if count > len(self.stack):
            raise ValueError("it takes more than it has")
        if not count:
            return []
        taken = self.stack[-count:]
        del self.stack[-count:]
        return taken

    def _pop_to_mark(self) -> list[Any]:
        position = (
            max(i for i, one in enumerate(self.stack) if one is _MARK)
            if (_MARK in self.stack)
            else -1
        )
        if position < 0:
            raise ValueError("it has an end without a beginning")
        taken = self.stack[position + 1 :]
        del self.stack[position:]
        return taken

    # -- what is named and would be called --------------------------------------------------------

    def _global(self, argument: str) -> None:
        self.stack.append(Name(str(argument).replace(" ", ".", 1)))

    def _stack_global(self, argument: Any) -> None:
        module, name = self._pop(2)
        self.stack.append(Name(f"{module}.{name}"))

    def _reduce(self, argument: Any) -> None:
        by, arguments = self._pop(2)
        self.stack.append(_plain(by, arguments))

    _newobj = _reduce

    def _newobj_ex(self, argument: Any) -> None:
        by, arguments, named = self._pop(3)
        self.stack.append(Made(by, tuple(arguments), items=dict(named)))

    def _inst(self, argument: str) -> None:
        arguments = self._pop_to_mark()
        self.stack.append(Made(Name(str(argument).replace(" ", ".", 1)), tuple(arguments)))

    def _obj(self, argument: Any) -> None:
        by, *arguments = self._pop_to_mark()
        self.stack.append(Made(by, tuple(arguments)))

    def _build(self, argument: Any) -> None:
        (state,) = self._pop(1)
        target = self.stack[-1]
        if isinstance(target, Made):
            target.state = state

    def _persid(self, argument: Any) -> None:
        self.stack.append(Persistent(argument))

    def _binpersid(self, argument: Any) -> None:
        (label,) = self._pop(1)
        self.stack.append(Persistent(label))

    # -- containers -------------------------------------------------------------------------------

    def _pop_one(self, argument: Any) -> None:
        self._pop(1)

    def _pop_mark(self, argument: Any) -> None:
        self._pop_to_mark()

    def _dup(self, argument: Any) -> None:
        self.stack.append(self.stack[-1])

    def _tuple(self, argument: Any) -> None:
        self.stack.append(tuple(self._pop_to_mark()))

    def _list(self, argument: Any) -> None:
        self.stack.append(self._pop_to_mark())

    def _frozenset(self, argument: Any) -> None:
        self.stack.append(frozenset(self._pop_to_mark()))

    def _dict(self, argument: Any) -> None:
        flat = self._pop_to_mark()
        self.stack.append(dict(zip(flat[::2], flat[1::2], strict=True)))

    def _append(self, argument: Any) -> None:
        self._extend(self._pop(1))

    def _appends(self, argument: Any) -> None:
        self._extend(self._pop_to_mark())

    _additems = _appends

    def _extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Made):
            target.members.extend(values)
        elif isinstance(target, set):
            target.update(values)
        else:
            target.extend(values)

    def _setitem(self, argument: Any) -> None:
        self._set(self._pop(2))

    def _setitems(self, argument: Any) -> None:
        self._set(self._pop_to_mark())

    def _set(self, flat: list[Any]) -> None:
        target = self.stack[-1]
        items = target.items if isinstance(target, Made) else target
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            items[key] = value


def _plain(by: Any, arguments: Any) -> Any:
    arguments = tuple(arguments)
    make = _PLAIN.get(by.path) if isinstance(by, Name) else None
    if make is None or len(arguments) > 1:
        return Made(by, arguments)
    given = arguments[0] if arguments else ()
    if not isinstance(given, (list, tuple, set, frozenset, dict)):
        return Made(by, arguments)
    return make(given)


def names_in(tree: Any) -> Iterator[str]:
    """The names that would be called for what was read, each as often as it would be."""
    seen: set[int] = set()
    waiting = [tree]
    while waiting:
        one = waiting.pop()
        if isinstance(one, (str, bytes, bytearray, int, float, type(None), Name)):
            continue
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Made):
            if one.kind:
                yield one.kind
            waiting += [one.by, *one.arguments, one.state, *one.members, one.items]
        elif isinstance(one, dict):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, (list, tuple, set, frozenset)):
            waiting += one
        elif isinstance(one, Persistent):
            waiting.append(one.label)
