"""Which modules of the shim's tools a process has loaded; a worker needs none of them."""

from __future__ import annotations

import sys

TOOLS = "precision_shim_tools"
STAND_INS = f"{TOOLS}.testing"


def loaded_tools() -> list[str]:
    """The tools' modules in this process, without the stand-ins that the tests themselves load."""
    loaded = {name for name in sys.modules if name.partition(".")[0] == TOOLS}
    stand_ins = {name for name in loaded if name.startswith(STAND_INS)}
    return sorted(loaded - stand_ins - ({TOOLS} if stand_ins else set()))
