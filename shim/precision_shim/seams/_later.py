"""A table of seams from its record, whose functions are imported when they are first called.

The import of a framework then loads none of the modules that wrap the framework's functions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from inspect import Parameter, Signature
from pkgutil import resolve_name
from typing import Any

from ..process.forks import Loading
from ._seam import REQUIRED, Seam

_loading = Loading()


class Later:
    """A seam's wrapper or ``native``, named by a record, and imported when it is first called."""

    def __init__(self, name: str, kind: Iterable[Any], reads: Iterable[Any]) -> None:
        """Make the function from its ``kind_of`` and from its parameters after the first.

        Each parameter is a list of the name and of the default, if there is one.
        """
        self.__module__, _, self.__qualname__ = name.partition(":")
        named = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=default[0] if default else REQUIRED)
            for name, *default in reads
        ]
        self.__signature__ = Signature([Parameter("call", Parameter.POSITIONAL_OR_KEYWORD), *named])
        self.kind = tuple(kind)
        self._function: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._function is None:
            with _loading:  # for which a fork waits: a child never ends its parent's imports
                self._function = resolve_name(f"{self.__module__}:{self.__qualname__}")
        return self._function(*args, **kwargs)


def read_record(text: str, digest: str) -> tuple[Seam, ...] | None:
    """Return a record's seams; ``None`` if it is of other source than that with this digest.

    Raises:
        Exception: the text is no record.
    """
    record = json.loads(text)
    if record["source"] != digest:
        return None
    functions = {name: Later(name, *facts) for name, facts in record["functions"].items()}
    for row in record["seams"]:
        for key, value in row.items():
            if key in ("wrapper", "native"):
                row[key] = functions.get(value)
            elif isinstance(value, list):
                row[key] = tuple(value)
    return tuple(Seam(**row) for row in record["seams"])
