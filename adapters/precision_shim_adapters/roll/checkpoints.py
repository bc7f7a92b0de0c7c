"""Tell whether a checkpoint of ROLL on FSDP2 has states, for the worker and for the doctor."""

from __future__ import annotations

from pathlib import Path

from precision_shim.adapting.scaling import METADATA, read_metadata
from precision_shim.errors import CheckpointUnreadableError

FSDP2 = "fsdp2"
"""The group name (see ``Seam``) of the seams for ROLL on FSDP2."""


def has_states(directory: str | Path) -> bool:
    """Whether a distributed checkpoint of ROLL on FSDP2 has states of an optimizer that stepped."""
    file_name = Path(directory, METADATA)
    try:
        with file_name.open("rb") as file:
            _, entries = read_metadata(file, str(file_name))
    except (OSError, CheckpointUnreadableError):
        return False  # ROLL's load raises an error for an unreadable checkpoint
    return any(key.startswith("optimizer.state.") for key in entries)
