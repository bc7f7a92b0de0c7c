"""Read a pickle as plain data, without importing or calling anything that the pickle names.

``pickletools`` parses the operations of a pickle; ``_Machine`` executes them on plain data. A
``Name`` represents a global that the pickle names, and a ``Made`` represents an object that a call
in the pickle would create.

``pickle.Unpickler`` is not safe here, even with a strict ``find_class``: it hashes every key and
makes every copy that a file demands. A few hundred bytes can make ``pickle.Unpickler`` run for
ever, fill the memory or overflow the stack. This module limits the size of keys and the number of
copies, and records each call, even if the pickle discards the call's result.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from ..errors import CheckpointUnreadableError

__all__ = ["Made", "Name", "Persistent", "dicts_in", "is_small", "read_pickle"]


@dataclass(frozen=True)
class Name:
    """A global that a pickle would import, such as ``"torch.float32"``."""

    path: str


@dataclass(frozen=True)
class Persistent:
    """An object that is stored outside the pickle and that the pickle refers to by a label."""

    label: Any


@dataclass(eq=False, repr=False)
class Made:
    """An object that a call in a pickle would create.

    Attributes:
        by: the callable that the pickle would call.
        arguments: the arguments of the call.
        state: the state that the pickle would set, such as a dict of the object's fields.
        items: the items that the pickle would set by key.
        members: the values that the pickle would append.
    """

    by: Any
    arguments: tuple[Any, ...]
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)
    members: list[Any] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """The import path of the callable ``by``; empty if ``by`` is not a ``Name``."""
        return self.by.path if isinstance(self.by, Name) else ""

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field of the object's state."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


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
_PUT = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})
_GET = frozenset({"GET", "BINGET", "LONG_BINGET"})
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_NOTHING = frozenset({"PROTO", "FRAME"})
_PLAIN = {
    "torch.Size": tuple,
    "collections.OrderedDict": dict,
    **{
        f"{module}.{kind.__name__}": kind
        for module in ("builtins", "__builtin__")  # protocols up to 2 use "__builtin__"
        for kind in (set, frozenset, tuple, list, bytes, bytearray)
    },
}
"""The only callables that ``_plain`` calls: types of plain data."""

_KEY = 64
"""Maximum number of values in a key: hashing visits a value once for each reference to it."""

_COPIED = 20_000_000
"""Maximum number of values copied for one pickle: a pickle may copy the same list many times."""


def read_pickle(source: bytes | IO[bytes], where: str, called: set[str] | None = None) -> Any:
    """Read the first pickle of a file.

    Args:
        source: the file's bytes, or the open file.
        where: the file, for messages.
        called: a set; this function adds the names of all callables that the pickle would call,
            even if the pickle discards a call's result.

    Raises:
        CheckpointUnreadableError: there is no complete pickle.
    """
    try:
        return _Machine(set() if called is None else called).run(source)
    except CheckpointUnreadableError:
        raise
    except RecursionError:
        reason = "it is nested too deeply"
    except MemoryError:
        reason = "it asks for more memory than there is"
    except Exception as error:  # a damaged file may cause any error
        reason = " ".join(str(error).split()) or type(error).__name__
    raise CheckpointUnreadableError(f"{where}: no whole pickle ({reason[:120]}).")


class _Machine:
    def __init__(self, called: set[str]) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.called = called
        self.copied = 0

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
            stack.append(tuple(self._pop(_TUPLES[name])))
        elif name in _PUT:
            self.memo[len(self.memo) if argument is None else int(argument)] = stack[-1]
        elif name in _GET:
            stack.append(self.memo[int(argument)])
        elif name in _OPERATIONS:
            _OPERATIONS[name](self, argument)
        elif name not in _NOTHING:
            raise ValueError(f"it has the operation {name}, which no checkpoint needs")

    def _pop(self, count: int) -> list[Any]:
        if count > len(self.stack) - (self.marks[-1] if self.marks else 0):
            raise ValueError("it takes more than it has")
        if not count:
            return []
        taken = self.stack[-count:]
        del self.stack[-count:]
        return taken

    def mark(self, argument: Any) -> None:
        self.marks.append(len(self.stack))

    def pop(self, argument: Any) -> None:
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self._pop(1)

    def _pop_to_mark(self) -> list[Any]:
        if not self.marks:
            raise ValueError("it has an end without a beginning")
        position = self.marks.pop()
        taken = self.stack[position:]
        del self.stack[position:]
        return taken

    def global_(self, argument: str) -> None:
        self.stack.append(Name(str(argument).replace(" ", ".", 1)))

    def stack_global_(self, argument: Any) -> None:
        module, name = self._pop(2)
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("it has a name that is no text")
        self.stack.append(Name(f"{module}.{name}"))

    def reduce_(self, argument: Any) -> None:
        by, arguments = self._pop(2)
        self._call(by, arguments)
        self.stack.append(self._plain(by, arguments))

    def newobj_ex_(self, argument: Any) -> None:
        by, arguments, named = self._pop(3)
        self._call(by, arguments)
        if not isinstance(named, dict):
            raise ValueError("it would call something with names that are none")
        self.stack.append(Made(by, arguments, items=named))

    def inst_(self, argument: str) -> None:
        by, arguments = Name(str(argument).replace(" ", ".", 1)), tuple(self._pop_to_mark())
        self._call(by, arguments)
        self.stack.append(Made(by, arguments))

    def obj_(self, argument: Any) -> None:
        by, *arguments = self._pop_to_mark()
        self._call(by, tuple(arguments))
        self.stack.append(Made(by, tuple(arguments)))

    def _call(self, by: Any, arguments: Any) -> None:
        if not isinstance(arguments, tuple):  # pickle calls only with a tuple
            raise ValueError("it would call something with arguments that are none")
        if isinstance(by, Name):
            self.called.add(by.path)

    def _plain(self, by: Any, arguments: tuple[Any, ...]) -> Any:
        path = by.path if isinstance(by, Name) else ""
        given = arguments[0] if arguments else ()
        if path == "_codecs.encode" and isinstance(given, str) and arguments[1:] == ("latin1",):
            self._copy(given)
            return given.encode("latin1")  # pickle protocols up to 2 write bytes as latin1 text
        make: Any = _PLAIN.get(path)
        if make is None or len(arguments) > 1:
            return Made(by, arguments)
        if not isinstance(given, (list, tuple, set, frozenset, dict, bytes, bytearray)):
            return Made(by, arguments)
        if type(given) is not tuple or make is not tuple:
            self._copy(given)
        if make in (set, frozenset):
            return make(map(_key, given))
        if make is dict and not isinstance(given, dict):
            pairs: Any = given
            return {_key(key): value for key, value in pairs}
        return make(given)

    def _copy(self, given: Any) -> None:
        self.copied += len(given)
        if self.copied > _COPIED:
            raise ValueError("it copies its content again and again")

    def build_(self, argument: Any) -> None:
        (state,) = self._pop(1)
        target = self.stack[-1]
        if isinstance(target, Made):
            target.state = state

    def persid_(self, argument: Any) -> None:
        self.stack.append(Persistent(argument))

    def binpersid_(self, argument: Any) -> None:
        (label,) = self._pop(1)
        self.stack.append(Persistent(label))

    def pop_mark_(self, argument: Any) -> None:
        self._pop_to_mark()

    def dup_(self, argument: Any) -> None:
        self.stack.append(self.stack[-1])

    def tuple_(self, argument: Any) -> None:
        self.stack.append(tuple(self._pop_to_mark()))

    def list_(self, argument: Any) -> None:
        self.stack.append(self._pop_to_mark())

    def frozenset_(self, argument: Any) -> None:
        self.stack.append(frozenset(map(_key, self._pop_to_mark())))

    def dict_(self, argument: Any) -> None:
        flat = self._pop_to_mark()
        self.stack.append(dict(zip(map(_key, flat[::2]), flat[1::2], strict=True)))

    def append_(self, argument: Any) -> None:
        self._extend(self._pop(1))

    def appends_(self, argument: Any) -> None:
        self._extend(self._pop_to_mark())

    def _extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Made):
            target.members.extend(values)
        elif isinstance(target, set):
            target.update(map(_key, values))
        else:
            target.extend(values)

    def setitem_(self, argument: Any) -> None:
        self._set(self._pop(2))

    def setitems_(self, argument: Any) -> None:
        self._set(self._pop_to_mark())

    def _set(self, flat: list[Any]) -> None:
        target = self.stack[-1]
        items = target.items if isinstance(target, Made) else target
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            items[_key(key)] = value


_OPERATIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine.mark,
    "POP": _Machine.pop,
    "POP_MARK": _Machine.pop_mark_,
    "DUP": _Machine.dup_,
    "GLOBAL": _Machine.global_,
    "STACK_GLOBAL": _Machine.stack_global_,
    "REDUCE": _Machine.reduce_,
    "NEWOBJ": _Machine.reduce_,
    "NEWOBJ_EX": _Machine.newobj_ex_,
    "INST": _Machine.inst_,
    "OBJ": _Machine.obj_,
    "BUILD": _Machine.build_,
    "PERSID": _Machine.persid_,
    "BINPERSID": _Machine.binpersid_,
    "TUPLE": _Machine.tuple_,
    "LIST": _Machine.list_,
    "FROZENSET": _Machine.frozenset_,
    "DICT": _Machine.dict_,
    "APPEND": _Machine.append_,
    "APPENDS": _Machine.appends_,
    "ADDITEMS": _Machine.appends_,
    "SETITEM": _Machine.setitem_,
    "SETITEMS": _Machine.setitems_,
}
"""The operations that work on the stack; ``_do`` raises an error for an unknown operation."""


def _key(value: Any) -> Any:
    """Return a value as a dict key; raise ValueError if the value could take long to hash."""
    if isinstance(value, (tuple, frozenset, Persistent)) and not is_small(value, _KEY):
        raise ValueError("it has a key that is too large")
    return value


def dicts_in(
    tree: Any, leave: Callable[[dict[Any, Any]], bool] = lambda _: False
) -> Iterator[dict[Any, Any]]:
    """Yield each dict within the content of a pickle once, at any depth.

    Args:
        tree: the content, from ``read_pickle``.
        leave: function that returns whether to skip the values of the given dict.
    """
    waiting, seen = [tree], set()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, (dict, list, tuple, Made)) or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, dict):
            yield node
            if not leave(node):
                waiting += node.values()
        elif isinstance(node, Made):
            waiting += [node.state, node.items, *node.arguments]
        else:
            waiting += node


def is_small(tree: Any, most: int) -> bool:
    """Whether plain data has at most ``most`` values; each reference to a value counts as one."""
    waiting, count = [tree], 0
    while waiting:
        node = waiting.pop()
        count += 1
        inner: Iterable[Any] = ()
        if isinstance(node, Persistent):
            inner = (node.label,)
        elif isinstance(node, dict):
            inner = (*node.keys(), *node.values())
        elif isinstance(node, (list, tuple, set, frozenset)):
            inner = node
        elif isinstance(node, (str, bytes, bytearray)) and len(node) > most << 10:
            return False
        waiting += inner
        if count + len(waiting) > most:
            return False
    return True
