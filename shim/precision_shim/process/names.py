"""Names and words that several modules share."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

VARIABLE = "PRECISION_SHIM"
ON = ("1", "true", "on", "yes")
OFF = ("0", "false", "off", "no")
ENTRY_POINTS = "precision_shim.adapters"
"""Group of the entry points by which third parties' adapters are found."""


def meant(name: str, allowed: "Collection[str]") -> str:
    """Return a question that suggests the nearest name; ``""`` if no name is near."""
    from difflib import get_close_matches  # imported here, because start-up must be fast

    near = get_close_matches(name, allowed, n=1)
    return f"did you mean {near[0]}?" if near else ""
