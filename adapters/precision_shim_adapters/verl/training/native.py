"""What verl has itself, for each start of a worker: this module imports nothing."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from precision_shim.adapting import Settings, Symbol


def native_dispatch(symbol: Symbol, settings: Settings) -> str | None:
    """Return a reason to skip the seam in verl 0.9, unless ``optimizer_states=follow-model``."""
    if "bf16" in symbol.parameters and settings["optimizer_states"] != "follow-model":
        return "verl dispatches on the dtype and has the opt-in in its own optimizer config"
    return None
