"""The sizes of a job's parallel groups, and their names in Megatron's and frameworks' configs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """The sizes of a job's parallel groups.

    Attributes:
        world: number of GPUs.
        expert_tensor: size of expert tensor parallelism; ``None`` for the size of ``tensor``.
        virtual: number of chunks of a pipeline stage; ``None`` for one.
        first: number of layers of the first stage, if the config has this number.
        last: number of layers of the last stage, if the config has this number.
        count_embedding: whether the embedding counts as a layer.
        count_loss: whether the output layer counts as a layer.
        stages: as ``pipeline_model_parallel_layout``: letters, or a list of layer names per stage.
        keys: maps attribute names to config keys, for messages.
    """

    world: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    virtual: int | None = None
    first: int | None = None
    last: int | None = None
    count_embedding: bool = False
    count_loss: bool = False
    stages: str | Sequence[Sequence[str]] | None = None
    keys: Mapping[str, str] = field(default_factory=dict)

    @property
    def experts_tensor(self) -> int:
        """Tensor parallelism of the experts."""
        return self.expert_tensor or self.tensor

    @property
    def shared_by(self) -> int:
        """Number of ranks over which the states of dense parameters are sharded."""
        return max(self.world // (self.tensor * self.pipeline), 1)

    @property
    def experts_shared_by(self) -> int:
        """Number of ranks over which the states of experts are sharded."""
        return max(self.world // (self.experts_tensor * self.expert * self.pipeline), 1)

    def to_dict(self) -> dict[str, Any]:
        """The group sizes with their usual abbreviations as keys, for text and JSON."""
        return {
            "tp": self.tensor,
            "pp": self.pipeline,
            "cp": self.context,
            "ep": self.expert,
            "etp": self.experts_tensor,
            "dp": self.shared_by // self.context,
            "edp": self.experts_shared_by,
        }


FIELDS = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
    "expert_tensor": "expert_tensor_parallel_size",
    "virtual": "virtual_pipeline_model_parallel_size",
    "first": "num_layers_in_first_pipeline_stage",
    "last": "num_layers_in_last_pipeline_stage",
    "count_embedding": "account_for_embedding_in_pipeline_split",
    "count_loss": "account_for_loss_in_pipeline_split",
    "stages": "pipeline_model_parallel_layout",
}
"""Maps the attributes of ``Sizes`` to their names in Megatron's and every framework's config."""


def read_sizes(
    world: int, world_key: str, key: str, section: Mapping[str, Any], within: str = ""
) -> Sizes:
    """Read the sizes of a model's parallel groups from a ``section`` of a framework's config.

    ``world_key`` and ``key`` are the config's keys of the number of GPUs and of the section;
    ``within`` is the key of a nested section with fields of Megatron's transformer config.
    """
    inner = section.get(within) or {}
    values, keys = {}, {"world": world_key}
    for name, field_ in FIELDS.items():
        value = inner.get(field_)
        keys[name] = f"{key}.{field_}" if value is None else f"{key}.{within}.{field_}"
        value = section.get(field_) if value is None else value
        if value is not None:
            values[name] = value
    return Sizes(world, keys=keys, **values)
