"""What the shim assumes of NeMo-RL and NeMo-Automodel."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch

from precision_shim.adapting import look
from precision_shim_adapters.common.ray_actors import plain_class
from precision_shim_adapters.nemo_rl.training.workers import DTENSOR, TRAIN
from precision_shim_tools.testing import megatron_on_cpu, model_parallel


def overflowed() -> torch.nn.Linear:
    """A layer whose gradients are infinite."""
    layer = torch.nn.Linear(2, 2)
    for parameter in layer.parameters():
        parameter.grad = torch.full_like(parameter, float("inf"))
    return layer


def test_the_names_of_dtypes() -> None:
    """The shim scales the loss of a worker whose precision is "float16"."""
    setup = pytest.importorskip("nemo_rl.models.automodel.setup")
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    assert dict(setup.STRING_TO_DTYPE) == known


def test_workers_are_actor_classes() -> None:
    """The shim makes the actor class again, with a mixin as first base class."""
    # A later release may name the same worker in another module: the newest comes first.
    workers = {
        worker.name: worker.module
        for worker in reversed(DTENSOR)
        if look(f"{worker.module}:{worker.name}").found
    }
    assert workers
    for name, module in workers.items():
        beneath = plain_class(getattr(importlib.import_module(module), name))
        assert beneath is not None
        assert parameters(beneath.train)[: len(TRAIN)] == TRAIN


def parameters(method: Any) -> tuple[str, ...]:
    """A method's parameters after ``self``, even if a decorator hides the method's signature."""
    cells = [cell.cell_contents for cell in method.__closure__ or ()]
    inner = next((inside for inside in cells if inspect.isfunction(inside)), method)
    return tuple(inspect.signature(inner).parameters)[1:]


def test_the_first_dtensor_workers_norm_of_an_overflow() -> None:
    """The shim's scaler skips a step whose grad norm is infinite."""
    module = pytest.importorskip("nemo_rl.models.dtensor.parallelize")
    with megatron_on_cpu(), model_parallel():
        group = torch.distributed.group.WORLD
        layer = overflowed()
        norm = module.get_grad_norm(list(layer.parameters()), dp_cp_group=group, tp_group=group)
    assert norm == float("inf")


def test_the_second_dtensor_workers_norm_of_an_overflow() -> None:
    """The shim's scaler skips a step whose grad norm is infinite."""
    utils = pytest.importorskip("nemo_automodel.components.training.utils")
    if not hasattr(utils, "scale_grads_and_clip_grad_norm"):
        pytest.skip("NeMo-RL 0.4 clips elsewhere")
    norm = utils.scale_grads_and_clip_grad_norm(1.0, [overflowed()], foreach=False)
    assert float(norm) == float("inf")


def test_auxiliary_losses_of_experts_have_a_scale_of_their_own() -> None:
    """The shim multiplies the scale of auxiliary losses by the loss scale.

    The backward pass multiplies them by a number in a class, and not by the loss's gradient.
    """
    moe_utils = pytest.importorskip("nemo_automodel.components.moe.megatron.moe_utils")
    holder = getattr(moe_utils, "MoEAuxLossAutoScaler", None)
    if holder is None:
        pytest.skip("NeMo-Automodel before 0.2 has no such class")
    for scale, gradient in ((None, 1.0), (torch.tensor(8.0), 8.0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(holder, "main_loss_backward_scale", scale)
            loss, output = torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)
            (3.0 * holder.apply(output, loss)).backward()
        assert loss.grad is not None
        assert float(loss.grad) == gradient


class Layered(torch.nn.Module):
    """As much of a model as Automodel's parallelizer of experts needs: layers and an LM head."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        block = torch.nn.Module()
        block.mlp = torch.nn.Identity()
        self.model.layers = torch.nn.ModuleDict({"0": block})
        self.lm_head = torch.nn.Linear(8, 16, bias=False)
        self.found: list[torch.dtype] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(hidden)
        self.found.append(logits.dtype)
        return logits


@pytest.mark.parametrize("outer", [True, False])
def test_automodels_lm_head_in_fp32(outer: bool) -> None:
    """The shim says that the outer model rounds the logits of an LM head in fp32."""
    module = pytest.importorskip("nemo_automodel.components.moe.parallelizer")
    parameters = inspect.signature(module.apply_fsdp).parameters
    if "lm_head_precision" not in parameters:
        pytest.skip("this Automodel has no lm_head_precision")
    if "wrap_outer_model" not in parameters and not outer:
        pytest.skip("this Automodel wraps the outer model always")
    with megatron_on_cpu(), model_parallel():
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        model = Layered()
        options = {"lm_head_precision": "float32", "wrap_outer_model": outer}
        options |= {"pp_enabled": False, "ep_enabled": False, "ep_shard_enabled": False}
        taken = {name: value for name, value in options.items() if name in parameters}
        module.apply_fsdp(model, mesh, **taken)
        logits = model(torch.randn(2, 8))
    assert model.found == [torch.float32]
    assert logits.dtype is (torch.bfloat16 if outer else torch.float32)


def test_automodels_parallelizer_of_experts_takes_bf16() -> None:
    """NeMo-RL gives it no dtypes, whatever ``policy.precision`` is."""
    module = pytest.importorskip("nemo_automodel.components.moe.parallelizer")
    with megatron_on_cpu(), model_parallel():
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        model = Layered()
        options = {"pp_enabled": False, "ep_enabled": False, "ep_shard_enabled": False}
        parameters = inspect.signature(module.apply_fsdp).parameters
        taken = {name: value for name, value in options.items() if name in parameters}
        module.apply_fsdp(model, mesh, **taken)
        model(torch.randn(2, 8))
    assert model.found == [torch.bfloat16]
