"""Read ROLL's Megatron checkpoints for ``precision-shim checkpoint``, without torch.

With ``ckpt_format: legacy``, the default, ROLL saves the weights in one file per rank, next to the
optimizer's distributed checkpoint.

Delete this module when ROLL saves the weights in a distributed checkpoint too.
"""

from __future__ import annotations

from precision_shim.checkpoints.layout import PARAMS, Part
from precision_shim.checkpoints.tensors import Archive
from precision_shim.checkpoints.units import Unit

from .megatron_checkpoints import fill_part as fill_with_states


def fill_part(unit: Unit, part: Part) -> None:
    """Add an optimizer's states, and the weights from the ranks' files, to a ``Part``."""
    fill_with_states(unit, part)
    for file in sorted(unit.path.parent.glob("mp_rank_*/model_optim_rng.pt")):
        for keys, tensor in Archive(file).tensors():
            if not any(str(key).endswith("_extra_state") for key in keys):
                part.add(PARAMS, tensor)
