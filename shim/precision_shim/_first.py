# What every process reads whose environment asks for the shim: zz_precision_shim.pth executes this
# file as text. Compiled so, it costs 0.3 ms without bytecode where an import would cost 2; hence
# no docstrings and no imports but of what Python has loaded. docs/activation.md has the figures.

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

VARIABLE = "PRECISION_SHIM"
ON = ("1", "true", "on", "yes")
OFF = ("0", "false", "off", "no")
ENTRY_POINTS = "precision_shim.adapters"  # the group by which third parties' adapters are found
CARRIED = ("ray",)  # packages whose processes do not inherit the variables: see carriers/


class First:  # a finder that waits for an import of one of the names, and finds nothing itself
    finds_nothing = True

    def __init__(self, names: "Iterable[str]") -> None:
        self.names = names

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if name in self.names:
            self.names = ()
            try:
                from precision_shim._startup import take_over
            except ImportError:  # a tool has replaced sys.path, as pex does: go on without
                return None
            return take_over(name, target)
        return None


def wanted(frameworks: "Iterable[Any]") -> "set[str]":
    # A third party's framework is known by name only where the user names it. Otherwise it is
    # looked for when torch is imported: reading every distribution's entry points takes 10 to
    # 50 ms, which next to torch is nothing and in any other process would be everything.
    names = {"torch", *CARRIED}
    for one in frameworks:
        names.update(one.packages)
    for name in os.environ.get(VARIABLE + "_FRAMEWORKS", "").split(","):
        names.add(name.strip().lower().replace("-", "_"))
    names.discard("")
    return names


def start() -> None:
    # In a virtual environment start-up files are executed twice.
    if "precision_shim._startup" in sys.modules or any(
        hasattr(finder, "finds_nothing") for finder in sys.meta_path
    ):
        return
    if os.environ[VARIABLE].strip().lower() not in (*ON, "strict"):
        from precision_shim import _startup

        _startup.init()  # it says what is wrong
        return
    for place in sys.path:
        file = os.path.join(place, "precision_shim_adapters", "frameworks.py")
        if os.path.isfile(file):
            found: dict[str, Any] = {"__name__": "precision_shim_adapters.frameworks"}
            with open(file, "rb") as text:
                exec(text.read(), found)
            sys.meta_path.insert(0, First(wanted(found["FRAMEWORKS"])))
            return
