"""Read ROLL's checkpoints for ``precision-shim checkpoint``, without torch.

With ``ckpt_format: legacy``, the default, ROLL on Megatron saves the weights in one file per rank,
next to the optimizer's distributed checkpoint. Delete this module when it saves them there, too.
"""

from __future__ import annotations

from precision_shim.adapting import versioned
from precision_shim_adapters.roll.checkpoints import FSDP2, has_states

from .layout import CheckpointPart, Outcome
from .megatron_files import fill_part as fill_with_states
from .prediction import Here
from .tensors import Archive
from .units import Unit


def fill_part(unit: Unit, part: CheckpointPart) -> None:
    """Add an optimizer's states, and the weights from the ranks' files, to a ``Part``."""
    fill_with_states(unit, part)
    for file in sorted(unit.path.parent.glob("mp_rank_*/model_optim_rng.pt")):
        part.read[file] = unit.kind
        for keys, tensor in Archive(file).tensors():
            if not any(str(key).endswith("_extra_state") for key in keys):
                part.add("params", tensor)


def predict_sharded(part: CheckpointPart, here: Here) -> Outcome:
    """Predict how ROLL on FSDP2 would resume; its states may be in the subdirectory ``dcp``."""
    if not part.held.get("params"):
        return Outcome("fails", "it has no weights")
    places = [place for unit in part.units for place in (unit.path, unit.path / "dcp")]
    if part.scaler.state != "none" and any(map(has_states, places)):
        from precision_shim_adapters.torch_fp16 import FEATURE

        from . import torch_fp16  # only this import needs torch

        if here.in_force("roll", FEATURE, FSDP2):
            found = torch_fp16.predict_scaler("roll", part, here, shimmed=True)
            found = torch_fp16.states_of_others("roll", part) or found
            return found or Outcome("exact", "the shim makes the moments that ROLL loads into")
    who = versioned("roll", called="ROLL")
    because = f"{who} leaves moments out: it loads into an optimizer that has none yet"
    return Outcome("starts anew", because)
