"""In a real worker, optimizer and bucket follow the model unless the config sets them."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from precision_shim.errors import InconsistentPrecisionError, PrecisionShimWarning

from ..support import batch, nll_loss
from .support import POLICY

Make = Callable[..., AbstractContextManager[Any]]

OPEN = ("bf16", "fp16", "params_dtype")
FLAGS = ("bf16", "fp16", "params_dtype", "use_precision_aware_optimizer")


def config_of(made: Any) -> Any:
    """The OptimizerConfig that a worker's optimizer was made with."""
    return getattr(made.optimizer, "chained_optimizers", [made.optimizer])[0].config


def bucket_of(made: Any) -> torch.dtype:
    found: torch.dtype = made.model.buffers[0].grad_data.dtype
    return found


def flags(made: Any) -> dict[str, Any]:
    return {name: getattr(config_of(made), name) for name in FLAGS}


def decisions(shim: Any, subject: str, feature: str) -> list[str]:
    return [
        one["chosen"]
        for one in shim().to_dict()["decisions"]
        if (one["framework"], one["subject"], one["feature"]) == ("nemo-rl", subject, feature)
    ]


def trained(made: Any, steps: int = 3) -> tuple[torch.Tensor, list[float]]:
    losses = [
        float(made.train(batch(seed=seed), nll_loss())["global_loss"]) for seed in range(steps)
    ]
    return torch.cat([one.detach().flatten() for one in made.model.parameters()]), losses


def test_bf16_trains_bit_for_bit_as_without_the_shim(worker: Make, shim: Any) -> None:
    with worker() as made:
        before = trained(made)
    shim()
    with worker() as made:
        after = trained(made)
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]


@pytest.mark.parametrize("precision", ["float16", "float32"])
def test_keys_that_the_config_leaves_open_follow_the_model(
    worker: Make, shim: Any, precision: str
) -> None:
    with worker(precision, drop=OPEN) as made:
        assert flags(made)["bf16"] is flags(made)["fp16"] is False
    shim()
    with worker(precision, drop=OPEN) as made:
        found = flags(made)
        own = made.megatron_cfg.optimizer
    dtype = getattr(torch, precision)
    assert found == {
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "params_dtype": dtype,
        "use_precision_aware_optimizer": False,
    }
    assert own.bf16 is False, "the worker's config is the worker's"


def test_keys_that_are_there_win(worker: Make, shim: Any) -> None:
    shim(settings={"optimizer_states": "follow-model"})
    with worker() as made:
        found = flags(made)
    assert found == {
        "bf16": True,
        "fp16": False,
        "params_dtype": torch.float32,
        "use_precision_aware_optimizer": False,
    }


def test_follow_model_takes_the_table_beneath_the_config(
    worker: Make, shim: Any, fused_adam: str
) -> None:
    drop = ("use_precision_aware_optimizer",)
    options = {
        "drop": drop,
        "optimizer": {"adam_beta2": 0.95},
        "ddp": {"grad_reduce_in_fp32": False},
    }
    with worker(**options) as made:
        assert not config_of(made).use_precision_aware_optimizer
    shim(settings={"optimizer_states": "follow-model"})
    with worker(**options) as made:
        config = config_of(made)
        assert bucket_of(made) is torch.bfloat16
        trained(made, 1)
    assert config.use_precision_aware_optimizer
    assert config.main_grads_dtype is config.exp_avg_dtype is torch.bfloat16
    assert config.exp_avg_sq_dtype is torch.bfloat16
    assert config.params_dtype is torch.float32, "the config carries it"


def test_a_pair_that_disagrees(worker: Make, shim: Any, fused_adam: str) -> None:
    """A user's code changes the optimizer's config after the bucket is built."""
    shim(settings={"grad_bucket": "align"}, strict=True)
    module = importlib.import_module(POLICY.partition(":")[0])
    if not hasattr(module, "setup_optimizer"):
        module = importlib.import_module("nemo_rl.models.megatron.setup")
    own = module.setup_optimizer

    def changing(*, optimizer_config: Any, **others: Any) -> Any:
        changed = copy.copy(optimizer_config)
        changed.main_grads_dtype = torch.bfloat16
        return own(optimizer_config=changed, **others)

    options = {"optimizer": {"use_precision_aware_optimizer": True}}
    told = "expects bf16 main grads, the gradient bucket is fp32"
    with pytest.MonkeyPatch.context() as patch:  # undone before the shim's uninstall
        patch.setattr(module, "setup_optimizer", changing)
        with pytest.raises(InconsistentPrecisionError, match=told), worker(**options):
            pass


def test_a_bucket_is_aligned_where_the_user_asks_for_it(worker: Make, shim: Any) -> None:
    with worker(ddp={"grad_reduce_in_fp32": False}) as made:
        assert bucket_of(made) is torch.bfloat16
    shim(settings={"grad_bucket": "align"})
    with worker(ddp={"grad_reduce_in_fp32": False}, reference=True) as made:
        assert bucket_of(made) is torch.float32
        assert made.megatron_cfg.ddp.grad_reduce_in_fp32 is False
        trained(made, 1)
    aligned = ["gradient bucket fp32 (grad_reduce_in_fp32=True)"]
    assert decisions(shim, "policy", "grad-bucket-alignment") == aligned
    assert decisions(shim, "reference", "grad-bucket-alignment") == aligned


def test_a_model_that_nothing_trains_brings_no_warning(worker: Make, shim: Any) -> None:
    """The shim warns of the policy alone: reference model and teacher have no main grads."""
    shim()
    told = "policy: grad_reduce_in_fp32=False gives"
    with (
        pytest.warns(PrecisionShimWarning, match=told) as warned,
        worker(ddp={"grad_reduce_in_fp32": False}, reference=True),
    ):
        pass
    assert len([one for one in warned if one.category is PrecisionShimWarning]) == 1


def test_fp16_that_the_config_leaves_unscaled_is_named(worker: Make, shim: Any) -> None:
    shim()
    told = "fp16=False, bf16=True, but the model is fp16"
    with pytest.warns(PrecisionShimWarning, match=told), worker("float16") as made:
        found = flags(made)["fp16"], made.model.ddp_config.check_for_nan_in_grad
    # The model has no scaler to skip an overflow, so Megatron's NaN check still ends the job.
    assert found == (False, True)
    assert decisions(shim, "policy", "fp16-scaling") == ["no loss scaling"]
