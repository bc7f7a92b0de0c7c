"""Probes that check the shim's assumptions about the installed NeMo-RL and NeMo-Automodel.

``megatron.reading.probes`` checks the steps that Megatron skips in NeMo-RL's Megatron workers.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch

from precision_shim.adapting import Answer, look, probe

from ..ray_actors import plain_class
from .dtensor import TRAIN
from .places import DTENSOR

_SETUP = "nemo_rl.models.automodel.setup"
_CLIP_V1 = "nemo_rl.models.dtensor.parallelize"
_CLIP_V2 = "nemo_automodel.components.training.utils"
_AUXILIARY = "nemo_automodel.components.moe.megatron.moe_utils"


def _make_overflowed() -> torch.nn.Linear:
    layer = torch.nn.Linear(2, 2)
    for parameter in layer.parameters():
        parameter.grad = torch.full_like(parameter, float("inf"))
    return layer


@probe(
    "NeMo-RL's dtypes",
    assumes="policy.precision is one of three names, spelled as torch's",
    rule="precision_shim_adapters.nemo_rl.dtensor:build",
    needs=(_SETUP,),
)
def names() -> Answer:
    """The shim scales the loss of a worker whose precision is "float16"."""
    from nemo_rl.models.automodel.setup import STRING_TO_DTYPE

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return Answer(known, dict(STRING_TO_DTYPE))


_WORKERS = {
    worker.name: worker.module
    for worker in reversed(DTENSOR)
    if look(f"{worker.module}:{worker.name}").found
}
"""Maps the class name of a DTensor worker to its module in the installed NeMo-RL."""


@probe(
    "NeMo-RL's workers are actor classes",
    assumes="ray.remote has decorated each DTensor worker, the class beneath can be had from it, "
    "and trains on (data, loss_fn, eval_mode)",
    rule="precision_shim_adapters.nemo_rl.dtensor:redecorate",
    needs=("ray", *dict.fromkeys(_WORKERS.values())) if _WORKERS else ("nemo_rl.models.policy",),
)
def actor_classes() -> Answer:
    """The shim makes the actor class again, with a mixin as first base class."""
    found = {}
    for name, module in _WORKERS.items():
        beneath = plain_class(getattr(importlib.import_module(module), name))
        takes = () if beneath is None else _parameters(beneath.train)
        found[name] = ("actor class" if beneath is not None else "other", takes[: len(TRAIN)])
    return Answer(dict.fromkeys(_WORKERS, ("actor class", TRAIN)), found)


def _parameters(method: Any) -> tuple[str, ...]:
    """A method's parameters after ``self``, even if a decorator hides the method's signature."""
    cells = [cell.cell_contents for cell in method.__closure__ or ()]
    inner = next((inside for inside in cells if inspect.isfunction(inside)), method)
    return tuple(inspect.signature(inner).parameters)[1:]


@probe(
    "the first DTensor worker's norm of a gradient that is not finite",
    assumes="get_grad_norm says inf, and raises nothing",
    rule="precision_shim_adapters.nemo_rl.dtensor:unscale_first",
    needs=(_CLIP_V1,),
)
def norm_v1() -> Answer:
    """The shim's scaler skips a step whose grad norm is infinite."""
    from nemo_rl.models.dtensor.parallelize import get_grad_norm

    from precision_shim.testing.megatron_cpu import megatron_on_cpu, model_parallel

    with megatron_on_cpu(), model_parallel():
        group = torch.distributed.group.WORLD
        found = get_grad_norm(
            list(_make_overflowed().parameters()), dp_cp_group=group, tp_group=group
        )
    return Answer(float("inf"), found)


@probe(
    "the second DTensor worker's norm of a gradient that is not finite",
    assumes="scale_grads_and_clip_grad_norm says inf, and raises nothing",
    rule="precision_shim_adapters.nemo_rl.dtensor:unscale_first",
    needs=(_CLIP_V2,),
)
def norm_v2() -> Answer:
    """The shim's scaler skips a step whose grad norm is infinite."""
    from nemo_automodel.components.training import utils

    if not hasattr(utils, "scale_grads_and_clip_grad_norm"):  # NeMo-RL 0.4: elsewhere
        return Answer("elsewhere", "elsewhere")
    found = utils.scale_grads_and_clip_grad_norm(1.0, [_make_overflowed()], foreach=False)
    return Answer(float("inf"), float(found))


@probe(
    "auxiliary losses of experts have a scale of their own",
    assumes="NeMo-Automodel from 0.2 puts them into the backward pass times a number in a class, "
    "which is 1 by default, and not times the loss's gradient",
    rule="precision_shim_adapters.nemo_rl.dtensor:train",
    needs=(_AUXILIARY,),
)
def auxiliary() -> Answer:
    """The shim multiplies the scale of auxiliary losses by the loss scale."""
    from nemo_automodel.components.moe.megatron import moe_utils

    holder = getattr(moe_utils, "MoEAuxLossAutoScaler", None)
    if holder is None:
        return Answer("no such class", "no such class")
    before, found = holder.main_loss_backward_scale, []
    try:
        for scale in (None, torch.tensor(8.0)):
            holder.main_loss_backward_scale = scale
            loss, output = torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)
            (3.0 * holder.apply(output, loss)).backward()
            found.append(None if loss.grad is None else float(loss.grad))
    finally:
        holder.main_loss_backward_scale = before
    return Answer([1.0, 8.0], found)
