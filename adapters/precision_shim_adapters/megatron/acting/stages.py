"""Read the trainable dtypes of all pipeline stages of a model, so that stages plan equal dtypes.

The first and the last stage each have a copy of tied embeddings, and add up the copies' gradients.
If only the last stage had fp32 parameters, its bucket would be fp32, but the first stage's bf16.
Gradients in an fp32 bucket and gradients in a bf16 bucket cannot be added.
"""

from __future__ import annotations

from typing import Any

import torch.distributed

from precision_shim.precision.model import TrainableDtypes


def over_stages(model: TrainableDtypes, pg_collection: Any = None) -> TrainableDtypes:
    """Merge the trainable dtypes of a model chunk with those of the same chunk on other stages.

    Every rank of the pipeline-parallel group has to call this function for each chunk; all stages
    build equally many chunks.

    Args:
        model: the dtypes of this stage's chunk.
        pg_collection: the DDP's process groups; ``None`` for Megatron's global groups.
    """
    group = _find_group(pg_collection)
    if group is None or torch.distributed.get_world_size(group) < 2:
        return model
    every: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(every, model, group=group)
    return sum(every, TrainableDtypes())


def _find_group(pg_collection: Any) -> Any:
    """The pipeline-parallel group; ``None`` if there is none."""
    if not torch.distributed.is_initialized():
        return None
    group = getattr(pg_collection, "pp", None)
    if group is not None:
        return group
    from megatron.core import parallel_state

    return parallel_state.get_pipeline_model_parallel_group(check_initialized=False)
