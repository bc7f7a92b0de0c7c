"""The rank processes of a pair on Megatron, which verl's functions build, save and load."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from precision_shim.precision.remainders import join_master
from precision_shim_tools.testing.megatron_cpu import megatron_on_cpu, model_parallel, tiny_gpt
from precision_shim_tools.testing.transformer_engine import stand_in_transformer_engine

from ..audit.offloading import OFFLOAD, stepped
from ..processes.rank_server import Launch, look_ahead
from ..stand_ins.optimizer_states import loss_of_step
from ..verl.support import local_layers, save_without_a_manager
from ..verl.test_checkpoints import Job as Saved
from . import processes
from .drawing import Job, Pair, parse

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
YES = {"yes": True, "no": False}
COPIES = {
    "replace": dataclasses.replace,
    "pickle": lambda config: pickle.loads(pickle.dumps(config)),
    "deepcopy": copy.deepcopy,
}
FIELDS = {
    "aware": "use_precision_aware_optimizer",
    "avg": "exp_avg_dtype",
    "avg_sq": "exp_avg_sq_dtype",
    "grads": "main_grads_dtype",
    "masters": "main_params_dtype",
    "remainders": "store_param_remainders",
    "beta2": "adam_beta2",
}
"""The fields of Megatron's OptimizerConfig, by their names in a job."""


def prepare() -> None:
    """Import verl and megatron-core in the server."""
    import verl.utils.megatron.dist_checkpointing
    import verl.utils.megatron.optimizer
    import verl.utils.megatron_utils
    import verl.workers.engine.megatron.transformer_impl  # noqa: F401

    torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]
    save_without_a_manager()
    look_ahead("verl")


def overrides(job: Job) -> dict[str, Any]:
    """A job's ``override_optimizer_config``, as a user writes it."""
    found: dict[str, Any] = {}
    for name, key in FIELDS.items():
        text = getattr(job, name)
        if text:
            found[key] = YES.get(text, text)
    if job.beta2:
        found["adam_beta2"] = float(job.beta2)
    if job.offload:
        found |= OFFLOAD
    return found


def as_dtypes(fields: dict[str, Any]) -> dict[str, Any]:
    """Convert dtype names to dtypes, because an unpatched Megatron does not accept names."""
    known = {**DTYPES, "fp8": torch.uint8}
    return {key: known[value] if key.endswith("_dtype") else value for key, value in fields.items()}


def provider(job: Job) -> Any:
    """A model of one layer; if it is mixed, the norms stay fp32 when the rest becomes bf16.

    With biases, one parameter group of Megatron's has fp32 norms and bf16 biases.
    """
    if job.dtype in DTYPES:
        return tiny_gpt(DTYPES[job.dtype], num_layers=1)
    made = tiny_gpt(torch.bfloat16, num_layers=1, add_bias_linear=job.dtype == "mixed-biases")

    def mixed(*args: Any, **kwargs: Any) -> Any:
        model = made(*args, **kwargs)

        def narrow() -> Any:
            torch.nn.Module.bfloat16(model)
            for module in model.modules():
                if "Norm" in type(module).__name__:
                    module.float()
            return model

        model.bfloat16 = narrow
        return model

    mixed.config = made.config  # type: ignore[attr-defined]
    return mixed


class Training:
    """Trains a model and optimizer that verl's functions build; see ``processes.Training``."""

    def __init__(self, pair: Pair, job: Job) -> None:
        from omegaconf import OmegaConf
        from verl.utils.megatron.optimizer import get_megatron_optimizer, init_megatron_optim_config
        from verl.utils.megatron_utils import get_model

        torch.manual_seed(int(job.seed))
        made = provider(job)
        ddp = (
            {"override_ddp_config": {"grad_reduce_in_fp32": YES[job.bucket]}} if job.bucket else {}
        )
        chunks = get_model(made, transformer_config=made.config, **ddp)
        fields = overrides(job)
        if not job.has("dtype-coercion"):
            fields = as_dtypes(fields)
        config = OmegaConf.create(
            {
                "optimizer": "adam",
                "lr": 1e-2,
                "min_lr": 0.0,
                "clip_grad": 1.0,
                "weight_decay": 0.0,
                "override_optimizer_config": fields,
            },
            flags={"allow_objects": True},
        )
        fp32 = {"bf16": False} if job.dtype == "fp32" else {}
        try:
            optim = init_megatron_optim_config(config, fp16=job.dtype == "fp16", **fp32)
        except TypeError:  # unpatched, 0.7.1 has no bf16= and treats fp32 as bf16
            optim = init_megatron_optim_config(config, fp16=job.dtype == "fp16")
            if fp32:
                optim = dataclasses.replace(optim, bf16=False, params_dtype=torch.float32)
        if job.copied:
            optim = COPIES[job.copied](optim)
        self.config, self.sharding = optim, pair.sharding
        self.saved = Saved(chunks, get_megatron_optimizer(chunks, optim))
        self.chunks, self.optimizer = chunks, self.saved.optimizer
        bucket = {"grad_reduce_in_fp32": YES[job.bucket] if job.bucket else True}
        self.asked = {**overrides(job), "adam_beta2": optim.adam_beta2, **bucket}

    def steps(self, steps: range, overflows: tuple[int, ...]) -> list[list[Any]]:
        """See ``processes.Training``; each step also has the scale, after the norm."""
        from megatron.core.distributed import finalize_model_grads

        from precision_shim_adapters.megatron import skipping

        said = []
        rank = torch.distributed.get_rank()
        for step in steps:
            loss = loss_of_step(self.chunks, self.optimizer, 100 * step + rank)
            weight = 2.0**60 if step in overflows else 1.0
            self.optimizer.scale_loss(loss * weight).backward()
            finalize_model_grads(self.chunks)
            with skipping(succeeds=True):
                _, norm, _ = self.optimizer.step()
            said.append(
                [
                    *processes.numbers([float(loss), math.nan if norm is None else norm]),
                    self._scaler()[0],
                ]
            )
        return said

    def state(self) -> dict[str, Any]:
        """See ``processes.Training``."""
        parts: dict[str, list[torch.Tensor]] = {"master": [], "exp_avg": [], "exp_avg_sq": []}
        names = {p: n for chunk in self.chunks for n, p in chunk.named_parameters()}
        # Sorted by name, because Megatron's order depends on the kind of its optimizer.
        for _, values in sorted(
            ((names[parameter], values) for parameter, values in self._states()),
            key=lambda one: one[0],
        ):
            for name, value in zip(parts, values, strict=True):
                parts[name].append(value)
        scale, tracker, hysteresis = self._scaler()
        return {
            "parameters": processes.bits(
                p.detach() for chunk in self.chunks for p in chunk.parameters()
            ),
            **{name: processes.bits(values) for name, values in parts.items()},
            "step": [
                [int(group.get("step", 0)) for group in one.optimizer.param_groups]
                for one in self.optimizer.chained_optimizers
            ],
            "scale": scale,
            "tracker": tracker,
            "counts": hysteresis,
        }

    def _states(self) -> Iterator[tuple[Any, tuple[torch.Tensor, ...]]]:
        """Yields each parameter with its fp32 master and moments, unscaled."""
        for one in self.optimizer.chained_optimizers:
            inner = one.optimizer
            if hasattr(inner, "sub_optimizers"):
                owners = one.model_param_group_index_map
                for parameter, (_, *tensors) in zip(owners, stepped(one), strict=True):
                    yield parameter, tuple(value.float() for value in tensors)
                continue
            for parameter, (group, order) in one.model_param_group_index_map.items():
                shard = inner.param_groups[group]["params"][order]
                state = inner.state.get(shard, {})
                master = state.get("master_param", shard).detach()
                if master.dtype is torch.int16:
                    master = join_master(shard.detach(), master)
                elif shard.dtype is torch.float32:
                    master = shard.detach()  # FusedAdam updates no master of an fp32 weight.
                elif "master_param" in state and master.dtype is torch.float16:  # It has a scale.
                    master = inner.get_unscaled_state(shard, "master_param")
                moments = []
                for name in ("exp_avg", "exp_avg_sq"):
                    if name not in state:
                        moments.append(torch.zeros(shard.shape))
                    elif hasattr(inner, "get_unscaled_state"):
                        moments.append(inner.get_unscaled_state(shard, name).float())
                    else:
                        moments.append(state[name].float())
                yield parameter, (master.float(), *moments)

    def effective(self) -> dict[str, Any]:
        """See ``processes.Training``."""
        found: dict[str, Any] = {"bucket": str(self.chunks[0].ddp_config.grad_reduce_in_fp32)}
        for name in (*FIELDS.values(), "loss_scale_window", "hysteresis", "min_loss_scale"):
            found[name] = str(getattr(self.config, name, None))
        found["kinds"] = [type(one.optimizer).__name__ for one in self.optimizer.chained_optimizers]
        found["kept"] = sorted(
            {
                f"{name} {value.dtype}"
                for one in self.optimizer.chained_optimizers
                for state in one.optimizer.state.values()
                for name, value in state.items()
                if isinstance(value, torch.Tensor)
            }
        )
        return found

    def save(self, directory: Path) -> None:
        """See ``processes.Training``."""
        self.saved.save(directory, self.sharding)

    def load(self, directory: Path) -> None:
        """See ``processes.Training``."""
        self.saved.load(directory, self.sharding)

    def _scaler(self) -> tuple[Any, Any, Any]:
        scalers = [
            one.grad_scaler.state_dict()
            for one in self.optimizer.chained_optimizers
            if getattr(one, "grad_scaler", None) is not None
        ]
        if not scalers or "growth_tracker" not in scalers[0]:
            return None, None, None
        first = scalers[0]
        return float(first["scale"]), int(first["growth_tracker"]), int(first["hysteresis_tracker"])


@contextlib.contextmanager
def _transformer_engine(version: str) -> Iterator[None]:
    if version == "none":
        yield
        return
    with stand_in_transformer_engine(version):
        yield


def run(launch: Launch) -> dict[str, Any]:
    """Run a rank from its start to its end."""
    torch.set_num_threads(1)
    pair = parse(launch.options["pair"])
    with (
        _transformer_engine(pair.engine),
        megatron_on_cpu(),
        local_layers(),
        model_parallel(launch.world, launch.rank, f"{launch.store}-meet"),
    ):
        found = processes.run(launch, Training)
        if found["error"] is None:
            torch.distributed.barrier()
    return found
