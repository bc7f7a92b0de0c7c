"""Carriers pass the shim's environment variables to processes that do not inherit them.

Each carrier is a module named after the package that it patches, such as ``ray``. A carrier's
``enter()`` patches the carrier's package, now or when the package is imported; ``leave()`` removes
the patch. ``enter()`` and ``leave()`` do not import the package, and a second call does nothing.
"""

from ..names import VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


def variables(
    environ: "Mapping[str, str]", leave_out: "Mapping[str, str] | None" = None
) -> "dict[str, str]":
    """Return the shim's variables in an environment, without those in ``leave_out``."""
    return {
        name: value
        for name, value in environ.items()
        if (name == VARIABLE or name.startswith(f"{VARIABLE}_")) and name not in (leave_out or ())
    }
