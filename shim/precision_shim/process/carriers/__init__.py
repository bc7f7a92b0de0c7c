"""Carriers pass the shim's environment variables to processes that do not inherit them.

Each is a module named after the package that it patches; ``enter()`` patches it, now or at its
import, and ``leave()`` undoes it. Neither imports the package; a second call does nothing.
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
