"""Carriers pass the shim's environment variables to processes that do not inherit them.

Each carrier is a module named after the package that it patches, such as ``ray``. A carrier's
``enter()`` patches the carrier's package, now or when the package is imported; ``leave()`` removes
the patch. ``enter()`` and ``leave()`` do not import the package, and a second call does nothing.
"""

import sys

from ..names import VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


PACKAGES = ("ray",)
"""Packages that have a carrier: a module in this folder with the package's name."""


def enter(package: str) -> None:
    """Patch a package so that the processes it starts have the shim's variables."""
    from importlib import import_module

    import_module(f"{__name__}.{package}").enter()


def leave() -> None:
    """Undo every carrier's ``enter()``."""
    for package in PACKAGES:
        carrier = sys.modules.get(f"{__name__}.{package}")
        if carrier is not None:
            carrier.leave()


def variables(
    environ: "Mapping[str, str]", leave_out: "Mapping[str, str] | None" = None
) -> "dict[str, str]":
    """Return the shim's variables in an environment, without those in ``leave_out``."""
    return {
        name: value
        for name, value in environ.items()
        if (name == VARIABLE or name.startswith(f"{VARIABLE}_")) and name not in (leave_out or ())
    }
