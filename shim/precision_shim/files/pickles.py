"""Read a pickle without importing or calling anything that the pickle names.

Loading a pickle can run any code. Here every name is a stand-in, a subclass of ``Made``, whose call
only stores the arguments. Only methods of ``Made`` and ``_Dict``, ``tuple``, and methods of plain
data can be called. A malicious pickle can still waste time and memory.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Iterator
from typing import IO, Any, ClassVar

from ..errors import CheckpointUnreadableError


class Made:
    """An object that a call in a pickle would create; each subclass represents a name.

    Attributes:
        kind: the name that the pickle would import and call, such as ``"torch.Size"``.
        arguments: the arguments of the call.
        state: the state that the pickle would set.
        items: the items that the pickle would set by key.
        members: the values that the pickle would append.
    """

    kind: ClassVar[str] = ""
    arguments: tuple[Any, ...]
    state: Any
    items: dict[Any, Any]
    members: list[Any]

    def __new__(cls, *arguments: Any, **named: Any) -> Made:
        """Store the arguments; a pickle calls the class or only this function."""
        made = super().__new__(cls)
        made.arguments, made.state, made.items, made.members = arguments, None, named, []
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def append(self, value: Any) -> None:
        """Store a value that the pickle would append."""
        self.members.append(value)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field of the object's state."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


class _Dict(dict[Any, Any]):
    """Stands for ``collections.OrderedDict``; attributes of the OrderedDict are dropped."""

    def __setstate__(self, state: Any) -> None:
        """Set nothing: otherwise the pickle could replace this object's methods."""


_PLAIN: dict[str, type] = {"collections.OrderedDict": _Dict, "torch.Size": tuple}


class _Reader(pickle.Unpickler):
    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.named: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> type:
        path = f"{module}.{name}"
        if path not in self.named:
            self.named[path] = _PLAIN.get(path) or type("Made", (Made,), {"kind": path})
        return self.named[path]

    def persistent_load(self, label: Any) -> Any:
        return label  # torch.save's label of a storage: a tuple with its type and its file's name


def read_pickle(source: bytes | IO[bytes], where: str) -> Any:
    """Read the first pickle of a file as plain data.

    Each name becomes a subclass of ``Made``, and each object that a call would create an instance.

    Raises:
        CheckpointUnreadableError: there is no complete pickle.
    """
    reader = _Reader(io.BytesIO(source) if isinstance(source, bytes) else source)
    copyreg.clear_extension_cache()  # pickle takes objects from this cache without find_class
    try:
        return reader.load()
    except Exception as error:  # a damaged file may cause any error
        raise CheckpointUnreadableError(f"{where}: no whole pickle ({error!r:.120}).") from None
    finally:
        copyreg.clear_extension_cache()  # the cache may have a stand-in


def dicts_in(tree: Any) -> Iterator[dict[Any, Any]]:
    """Yield each dict within the content of a pickle once, at any depth."""
    waiting, seen = [tree], set()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, (dict, list, tuple, Made)) or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, dict):
            yield node
            waiting += node.values()
        elif isinstance(node, Made):
            waiting += [node.state, node.items, *node.arguments]
        else:
            waiting += node
