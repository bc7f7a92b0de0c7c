"""Ranks that train on Megatron over gloo; ``tests/processes/rank_server.py`` starts them.

The ranks need the set-up of the fixture ``cpu`` in ``conftest.py``.
"""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import precision_shim
from precision_shim.errors import CheckpointLayoutError
from precision_shim_adapters.megatron import building
from precision_shim_adapters.verl.config import read_requested
from precision_shim_tools.testing.megatron_cpu import megatron_on_cpu, model_parallel, tiny_gpt
from precision_shim_tools.testing.transformer_engine import stand_in_transformer_engine

from ..processes.rank_server import Launch, look_ahead
from ..stand_ins.megatron_bridge import import_megatron_bridge
from ..testing import tiny_training as tiny
from .megatron_fp16_support import Training
from .states_support import AWARE, KINDS, build, everything
from .support import local_layers, save_without_a_manager
from .test_checkpoints import job as adam_job
from .test_checkpoints import same, shim
from .test_megatron_fp16_resume import Fp16Job, fp16_job


def prepare() -> None:
    """Import verl and megatron-core in the server."""
    with contextlib.suppress(ModuleNotFoundError):  # not every environment has Megatron-Bridge
        import_megatron_bridge()
    import verl.utils.megatron.optimizer
    import verl.utils.megatron_utils
    import verl.workers.engine.megatron.transformer_impl
    import verl.workers.engine_workers  # noqa: F401

    torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]
    save_without_a_manager()
    look_ahead("verl")


def run(launch: Launch) -> Any:
    """Run a rank from its start to its end."""
    torch.set_num_threads(1)
    with stand_in_transformer_engine("2.11.0"), megatron_on_cpu(), local_layers():
        return {
            "checkpoints": checkpoints,
            "fp32_parameters": fp32_parameters,
            "overflows": overflows,
            "tied_embeddings": tied_embeddings,
        }[launch.case](launch.rank, Path(launch.folder))


def on_all_ranks(one: Any) -> tuple[bool, torch.Tensor]:
    """Return whether both ranks have the same parameters, and this rank's parameters."""
    flat = torch.cat([p.detach().float().flatten() for c in one.chunks for p in c.parameters()])
    both = [torch.empty_like(flat) for _ in range(2)]
    torch.distributed.all_gather(both, flat)
    return torch.equal(*both), flat


def everywhere(value: Any) -> list[Any]:
    both = [None, None]
    torch.distributed.all_gather_object(both, value)
    return both


# -- checkpoints -------------------------------------------------------------------------------


def checkpoints(rank: int, folder: Path) -> dict[str, str]:
    """Save and load on two ranks; returns the text of an error that one rank causes on both."""
    refused = {}
    with model_parallel(2, rank, str(folder / "meet")):
        for sharding in ("dp_reshardable", "fully_reshardable"):
            with shim(on=True):
                first = adam_job()
                first.train(3)
                first.save(folder / f"on-{sharding}", sharding)
                torch.distributed.barrier()
                # A load without the model restores both ranks' parameters from the masters.
                second = adam_job(seed=1)
                second.load(folder / f"on-{sharding}", sharding, model=False)
                equal, flat = on_all_ranks(second)
                assert equal
                assert torch.equal(flat, on_all_ranks(first)[1])
                assert same(first.states(), second.states())
                assert first.train(2, first=3) == second.train(2, first=3)
            # Rank 1 has zero states and no reason to refuse, but must not wait for rank 0 forever.
            with shim(on=False):
                third = adam_job()
                third.train(3)
                if rank == 1:
                    for one in third.optimizer.chained_optimizers:
                        for state in one.optimizer.state.values():
                            state["exp_avg"].zero_()
                            state["exp_avg_sq"].zero_()
                third.save(folder / f"off-{sharding}", sharding)
                torch.distributed.barrier()
            with shim(on=True):
                fourth = adam_job(seed=1)
                try:
                    fourth.load(folder / f"off-{sharding}", sharding)
                except CheckpointLayoutError as error:
                    refused[sharding] = str(error)
                else:
                    raise AssertionError("loaded")
    return refused


def fp32_parameters(rank: int, folder: Path) -> list[str]:
    """Models with fp32 parameters resume exactly; returns the kinds of models."""
    done = []
    with model_parallel(2, rank, str(folder / "meet")), shim(on=True, policy="as-configured"):
        for kind in KINDS:
            for sharding in ("dp_reshardable", "fully_reshardable"):
                place = folder / f"{kind}-{sharding}"
                first = build(kind, **AWARE)
                tiny.train(*first, steps=3, world=2, rank=rank)
                tiny.save(*first, place, sharding)
                torch.distributed.barrier()
                second = build(kind, seed=1, **AWARE)
                tiny.load(*second, place)
                assert all(map(torch.equal, everything(*first), everything(*second)))
                for one in (first, second):
                    tiny.train(*one, steps=2, first=3, world=2, rank=rank)
                assert all(map(torch.equal, everything(*first), everything(*second)))
            done.append(kind)
    return sorted(done)


# -- a pipeline ----------------------------------------------------------------------------------


def tied_embeddings(rank: int, folder: Path) -> dict[str, Any]:
    """Two stages with a copy each of tied embeddings; the second stage also has fp32 parameters.

    Returns for each case the dtypes of this stage's buckets, whether the optimizer is
    precision-aware, the sum of the two copies' gradients, and the stage's copy after a step.
    """
    found = {}
    with model_parallel(2, rank, str(folder / "meet"), pipeline_model_parallel_size=2):
        for on, low in ((False, False), (True, False), (True, True)):
            with shim(on=on):
                found[f"shim {on}, bf16 throughout {low}"] = _step_of_stage(rank, low)
    return found


def _step_of_stage(rank: int, low: bool) -> list[Any]:
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from omegaconf import OmegaConf
    from verl.utils.megatron.optimizer import get_megatron_optimizer, init_megatron_optim_config

    torch.manual_seed(0)
    config = tiny_gpt(torch.bfloat16, pipeline_model_parallel_size=2).config  # type: ignore[attr-defined]
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=32,
        max_sequence_length=8,
        pre_process=rank == 0,
        post_process=rank == 1,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    )
    model.bfloat16()
    for name, one in model.named_parameters():
        if rank == 1 and not low and "output_layer" not in name:
            one.data = one.data.float()
    fields = {"optimizer": "adam", "lr": 1e-2, "min_lr": 0.0, "clip_grad": 1.0, "weight_decay": 0.0}
    optim = OmegaConf.create({**fields, "override_optimizer_config": {}})
    with building("verl", lambda: read_requested(optim, declared=torch.bfloat16)):
        ddp = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
            model,
        )
        made = init_megatron_optim_config(optim, fp16=False)
        optimizer = get_megatron_optimizer([ddp], made)
    for buffer in ddp.buffers:
        buffer.grad_data.fill_(1.0)
    finalize_model_grads([ddp], None)
    embedding = model.shared_embedding_or_output_weight()
    gradient = float(embedding.main_grad.float().mean())
    assert optimizer.step()[0]
    return [
        sorted({str(buffer.grad_data.dtype) for buffer in ddp.buffers}),
        optimizer.chained_optimizers[0].config.use_precision_aware_optimizer,
        gradient,
        embedding.detach().float().flatten().tolist(),
    ]


# -- overflows ---------------------------------------------------------------------------------


def overflows(rank: int, folder: Path) -> None:
    """Experts use the dense optimizer's scale; both ranks skip an overflow of one rank."""
    with (
        model_parallel(2, rank, str(folder / "experts"), expert_model_parallel_size=2),
        pytest.MonkeyPatch.context() as patch,
    ):
        # Megatron calls current_device in a thread in which device names are not replaced.
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        moe()
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)  # the first model has set these variables
    with model_parallel(2, rank, str(folder / "dense")):
        lone(rank)


class LoneExperts(Fp16Job):
    """A job in which the experts' gradients overflow on rank 1 only."""

    OVERFLOWS = ()

    def before_step(self, step):
        if step in (1, 2, 3) and torch.distributed.get_rank() == 1:
            experts = [p for p in self.chunks[0].parameters() if not getattr(p, "allreduce", True)]
            assert experts
            for param in experts:
                param.main_grad.fill_(math.inf)


def experts():
    job = fp16_job(
        LoneExperts,
        num_moe_experts=2,
        expert_model_parallel_size=2,
        moe_token_dispatcher_type="allgather",
    )  # gloo has no all-to-all
    assert len(job.optimizer.chained_optimizers) == 2
    return job


def moe():
    """Train a mixture of experts, whose scales stay one."""
    precision_shim.install()
    job = experts()
    found = job.train(4)
    shimmed = job.scalers()
    assert shimmed == [(2.0**13, 0, 0)] * 2, shimmed
    assert everywhere(shimmed) == [shimmed] * 2
    assert found[3::2] == ["skipped"] * 3, found
    job.train(4, first=4)
    assert job.scalers() == [(2.0**14, 0, 3)] * 2, job.scalers()
    # A checkpoint with different scales: the first scale wins, because it multiplies the loss.
    other = job.optimizer.chained_optimizers[1].grad_scaler
    assert len(job.optimizer.chained_optimizers) == 2
    other.load_state_dict(
        {"scale": torch.tensor([8.0]), "growth_tracker": 1, "hysteresis_tracker": 1}
    )
    with pytest.warns(precision_shim.PrecisionShimWarning, match="different loss scales"):
        job.train(1, first=8)
    assert job.scalers() == [(2.0**14, 1, 3)] * 2, job.scalers()
    precision_shim.uninstall()


def lone(rank):
    """Only rank 1's data overflow; both ranks skip, count and report."""
    precision_shim.install()
    with pytest.MonkeyPatch.context() as patch:
        one = Training(
            Path(os.environ["CHECKPOINT"]),
            patch,
            overrides={"initial_loss_scale": 256.0, "hysteresis": 1},
        )
        own = one.worker.loss_fn

        def loss_fn(*args, **kwargs):
            loss, metrics = own(*args, **kwargs)
            alone = torch.distributed.get_rank() == 1 and one.poisoned
            return (loss * math.inf if alone else loss), metrics

        one.worker.set_loss_fn(loss_fn)
        seen = []
        for poisoned in (False, True, False):
            before = one.parameters()
            one.poisoned = poisoned
            metrics = one.train(seed=rank)
            seen.append(
                [metrics[key] for key in ("loss_scale", "skipped_steps")]
                + [math.isfinite(metrics["grad_norm"]), torch.equal(before, one.parameters())]
            )
        assert seen == [
            [256.0, 0.0, True, False],
            [256.0, 1.0, False, True],
            [128.0, 1.0, True, False],
        ], seen
        assert everywhere(seen) == [seen] * 2
        flat = everywhere(one.parameters())
        assert torch.equal(*flat)
    precision_shim.uninstall()
