"""Names and words that several modules share."""

VARIABLE = "PRECISION_SHIM"
ON = ("1", "true", "on", "yes")
OFF = ("0", "false", "off", "no")
ENTRY_POINTS = "precision_shim.adapters"
"""Group of the entry points by which third parties' adapters are found."""
