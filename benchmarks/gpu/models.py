"""Builds the models that the proof measures, and reads the states of their optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .place import Place

NAME = "proof-trainer"
WHOLE_TABLE = "follow-model"
"""Value of the setting ``optimizer_states`` with which a bf16 model has bf16 grads and moments."""
BETA2 = 0.95
"""With this beta2 a bf16 second moment can decay; the runs without the shim use it too."""


@dataclass(frozen=True)
class Size:
    """Sizes of a model and of its batches."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    length: int
    batch: int

    @property
    def parameters(self) -> float:
        """Approximate number of parameters: the layers' matrices, the embedding and the output."""
        return 12.0 * self.layers * self.hidden**2 + 2.0 * self.vocabulary * self.hidden


TINY = Size(layers=1, hidden=32, heads=2, vocabulary=256, length=16, batch=4)
SMALL = Size(layers=8, hidden=512, heads=8, vocabulary=256, length=256, batch=32)
MIDDLE = Size(layers=2, hidden=256, heads=4, vocabulary=256, length=64, batch=8)
BILLION = Size(layers=24, hidden=2048, heads=16, vocabulary=32768, length=512, batch=4)
SEVEN = Size(layers=32, hidden=4096, heads=32, vocabulary=32768, length=256, batch=1)


@contextmanager
def shim(on: bool = True, states: str = WHOLE_TABLE, **settings: Any) -> Iterator[None]:
    """If ``on``, install the shim with ``strict=True`` for the trainer; uninstall it at the end."""
    import precision_shim

    if not on:
        yield
        return
    precision_shim.install(
        frameworks=[NAME],
        strict=True,
        export=False,
        settings={"optimizer_states": states, "log": "quiet", **settings},
    )
    try:
        yield
    finally:
        precision_shim.uninstall()


def trainer(
    place: Place,
    size: Size,
    precision: str = "bfloat16",
    *,
    seed: int = 0,
    sharding: str = "dp_reshardable",
    optimizer: Mapping[str, Any] | None = None,
    lr: float = 1e-3,
) -> Any:
    """Build a trainer. If the shim is installed, it patches the trainer."""
    from megatron.core import tensor_parallel
    from proof_trainer.trainer import Config, Trainer  # type: ignore[import-not-found]

    from precision_shim_tools.testing import tiny_gpt

    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    provider = tiny_gpt(
        getattr(torch, precision),
        num_layers=size.layers,
        hidden_size=size.hidden,
        num_attention_heads=size.heads,
        vocab_size=size.vocabulary,
        max_sequence_length=size.length,
        use_cpu_initialization=place.dry,
    )
    fields = {"adam_beta2": BETA2, **(optimizer or {})}
    config = Config(precision, lr=lr, sharding=sharding, optimizer=fields)
    return Trainer(config, provider, place.device)


def parameters_of(made: Any) -> int:
    """How many parameters are trained."""
    return sum(one.numel() for one in made.model.parameters() if one.requires_grad)


def inner(made: Any) -> list[Any]:
    """The FusedAdams under Megatron's optimizer."""
    whole = made.optimizer
    return [one.optimizer for one in getattr(whole, "chained_optimizers", None) or [whole]]


def config_of(made: Any) -> Any:
    """The OptimizerConfig of the live optimizer."""
    whole = made.optimizer
    return (getattr(whole, "chained_optimizers", None) or [whole])[0].config


def held(made: Any) -> dict[str, torch.Tensor]:
    """Copies of parameters, masters and moments; masters and moments are converted to fp32."""
    from precision_shim.precision.remainders import join_master

    names = {param: name for name, param in made.model.named_parameters()}
    found = {f"{name} param": param.detach().clone() for param, name in names.items()}
    whole = made.optimizer
    for one in getattr(whole, "chained_optimizers", None) or [whole]:
        adam = one.optimizer
        for param, (group, order) in one.model_param_group_index_map.items():
            shard = adam.param_groups[group]["params"][order]
            state, name = adam.state[shard], names[param]
            if "master_param" in state:
                master = adam.get_unscaled_state(shard, "master_param")
                if master.dtype is torch.int16:
                    master = join_master(shard.detach(), master)
            else:
                master = shard.detach()
            found[f"{name} master"] = master.float().clone()
            for moment in ("exp_avg", "exp_avg_sq"):
                if moment in state:
                    value = adam.get_unscaled_state(shard, moment)
                    found[f"{name} {moment}"] = value.float().clone()
    return found


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Whether two results of ``held`` are equal, bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def differing(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that differ between two results of ``held``."""
    return sorted(
        key
        for key in one.keys() | other.keys()
        if key not in one or key not in other or not torch.equal(one[key], other[key])
    )


def summary(audit: Any) -> dict[str, float]:
    """Bytes per parameter in an audit, for each component that grows with the parameters."""
    from precision_shim.auditing.record import PER_PARAMETER

    (part,) = audit.parts
    return {name: part.components[name].bytes_per_parameter for name in PER_PARAMETER}
