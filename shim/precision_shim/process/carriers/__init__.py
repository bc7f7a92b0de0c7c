"""What carries the shim's variables into processes that do not inherit them: one module each.

A carrier's module has the name of its package, and
two functions: ``enter()``, now if the package is imported and else when it will be, and
``leave()``. Neither imports the package, and a second call does nothing.
"""

import sys

from ..names import VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


PACKAGES = ("ray",)
"""The packages whose processes are reached."""


def enter(package: str) -> None:
    """Let a package's processes come up with the variables."""
    from importlib import import_module

    import_module(f"{__name__}.{package}").enter()


def leave() -> None:
    """Leave every package that was entered."""
    for package in PACKAGES:
        carrier = sys.modules.get(f"{__name__}.{package}")
        if carrier is not None:
            carrier.leave()


def variables(
    environ: "Mapping[str, str]", leave_out: "Mapping[str, str] | None" = None
) -> "dict[str, str]":
    """The shim's variables in an environment."""
    return {
        name: value
        for name, value in environ.items()
        if (name == VARIABLE or name.startswith(f"{VARIABLE}_")) and name not in (leave_out or ())
    }
