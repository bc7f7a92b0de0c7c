"""The ranks of ``test_repeated.py``: two stages of a pipeline, or two data-parallel ranks.

Those of ``test_stages.py`` are here, too.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import Any

import pytest
import torch

import precision_shim
from precision_shim.testing import (
    megatron_on_cpu,
    model_parallel,
    stand_in_transformer_engine,
    tiny_gpt,
)
from precision_shim_adapters.megatron import RequestedConfig, building, metrics

from ..rank_server import Launch, look_ahead


def prepare() -> None:
    """Import megatron-core, in the server."""
    import megatron.core.models.gpt
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel  # noqa: F401

    look_ahead("megatron")


def run(launch: Launch) -> Any:
    """Run a rank from its start to its end."""
    torch.set_num_threads(1)
    with (
        stand_in_transformer_engine(),
        megatron_on_cpu(),
        model_parallel(
            2, launch.rank, launch.store, pipeline_model_parallel_size=launch.options["stages"]
        ),
    ):
        precision_shim.install(
            frameworks="megatron", features="fp16-scaling", strict=True, export=False
        )
        try:
            return {"repeated": repeated, "fsdp": fsdp}[launch.case](launch)
        finally:
            precision_shim.uninstall()


def repeated(launch: Launch) -> dict[str, Any]:
    """Train with an exception on rank 1, and without; returns what differs."""
    right, made = _Stage(launch.options), _Stage(launch.options)
    expected = [right.step(number) for number in range(3)]
    found = [made.step(0)]
    made.backward(1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found += [made.interrupted(launch.options["place"], launch.rank == 1)]
    found += [made.step(2)]
    return {
        "equal": all(map(torch.equal, right.parameters(), made.parameters())),
        "expected": expected,
        "found": found,
        "states": [right.state(), made.state()],
        "said": [str(one.message) for one in said if "without new" in str(one.message)],
    }


def fsdp(launch: Launch) -> bool:
    """Build Megatron-FSDP's stage of a model whose last stage trains only fp32 parameters.

    Returns ``check_for_nan_in_grad``. A CPU runs the ``__init__`` of Megatron-FSDP in part only.
    """
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    config = DistributedDataParallelConfig(check_for_nan_in_grad=True)
    dtype = (torch.float16, torch.float32)[launch.rank]
    made = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    with (
        building("megatron", lambda: RequestedConfig(asked={"fp16": True})),
        contextlib.suppress(Exception),
    ):
        made.__init__(object(), config, torch.nn.Linear(2, 2, dtype=dtype))  # type: ignore[misc]
    return bool(vars(made)["ddp_config"].check_for_nan_in_grad)


class _Stage:
    def __init__(self, options: Any) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        provider = tiny_gpt(
            torch.float16, num_layers=2, pipeline_model_parallel_size=options["stages"]
        )
        config = provider.config  # type: ignore[attr-defined]
        torch.manual_seed(0)
        model = provider(
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        )
        distributed = options["distributed"]
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=distributed, grad_reduce_in_fp32=True
        )
        self.model = DistributedDataParallel(config, ddp_config, Float16Module(config, model))
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-2,
                fp16=True,
                params_dtype=torch.float16,
                use_distributed_optimizer=distributed,
                initial_loss_scale=1024.0,
                loss_scale_window=2,
                clip_grad=0.0,
            ),
            [self.model],
        )
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads

    def backward(self, number: int) -> None:
        """Make the gradients of two microbatches with Megatron's own schedule."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        generator = torch.Generator().manual_seed(number)
        rows = torch.randint(0, 32, (4, 8), generator=generator)
        if torch.distributed.get_world_size() > 1 and self.stages == 1:
            rows = rows.chunk(2)[torch.distributed.get_rank()]
        micro = rows.repeat(2, 1).chunk(2)

        def forward(iterator: Any, model: Any) -> Any:
            tokens = next(iterator)
            positions = torch.arange(8).expand(tokens.shape[0], 8)
            output = model(tokens, positions, None, labels=tokens)
            return output, lambda loss: (loss.float().mean(), {})

        self.model.zero_grad_buffer()  # and not zero_grad() of the optimizer
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(micro),
            model=[self.model],
            num_microbatches=2,
            seq_length=8,
            micro_batch_size=micro[0].shape[0],
            forward_only=False,
        )

    @functools.cached_property
    def stages(self) -> int:
        from megatron.core import parallel_state

        return int(parallel_state.get_pipeline_model_parallel_world_size())

    def step(self, number: int) -> Any:
        self.backward(number)
        return self.again()

    def again(self) -> Any:
        successful, norm, _ = self.optimizer.step()
        return successful, float(norm)

    def interrupted(self, place: str, here: bool) -> Any:
        """A step that an exception ends on one rank, and then on both ranks again."""
        if here:
            (inner,) = self.optimizer.chained_optimizers
            owner = {"norm": self.optimizer, "update": inner.optimizer}[place]
            own = getattr(owner, name := {"norm": "get_grad_norm", "update": "step"}[place])

            def fail(*args: Any, **kwargs: Any) -> None:
                if place == "norm":
                    own(*args, **kwargs)
                raise OSError("interrupted")

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(owner, name, fail)
                with pytest.raises(OSError, match="interrupted"):
                    self.again()
        else:
            self.again()
        torch.distributed.barrier()
        return self.again()

    def parameters(self) -> list[torch.Tensor]:
        return [one.detach().clone() for one in self.model.parameters()]

    def state(self) -> Any:
        (inner,) = self.optimizer.chained_optimizers
        state = {key: float(value) for key, value in inner.grad_scaler.state_dict().items()}
        return state | metrics(self.optimizer)
