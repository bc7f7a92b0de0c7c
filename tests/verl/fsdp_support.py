"""Shared by the fp16 tests on FSDP: verl's real engines and workers on a CPU, over gloo.

Only the ranks' processes (``fsdp_ranks.py``) import this module; pytest does not. FSDP2 trains
on a CPU without changes, so only verl's device functions are replaced. FSDP1 does not start
on a CPU: torch refuses ("FSDP needs a non-CPU accelerator device").
"""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed.tensor import DTensor

from ..processes.composed_once import composed_once
from ..stand_ins.tiny_models import VOCABULARY
from .support import batch as supervised_batch
from .support import training_config, value_loss

VERL = Version(version("verl"))
LEGACY = Version("0.8") > VERL
"""Whether this version of verl trains with legacy workers by default."""


def prepare() -> None:
    """Import verl's engine, and make the CPU its accelerator."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ[name] = "1"
    for name, value in {
        "empty_cache": None,
        "max_memory_allocated": 0,
        "max_memory_reserved": 0,
        "memory_allocated": 0,
        "memory_reserved": 0,
        "mem_get_info": (1, 1),
    }.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, lambda *args, _value=value, **kwargs: _value)
    for name in ("get_rng_state", "set_rng_state"):  # verl 0.9 calls both for the device
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, getattr(torch, name))
    try:
        from verl.plugin.platform import platform_cuda, set_platform
    except ImportError:  # before 0.9 verl detects the CPU itself
        pass
    else:

        class CpuPlatform(platform_cuda.PlatformCUDA):
            """A CPU platform, without which verl 0.9 falls back on cuda."""

            device_name = "cpu"
            device_module = torch.cpu

            def is_available(self) -> bool:
                return True

            def current_device(self) -> Any:
                return "cpu"

            def device_count(self) -> int:
                return 1

            def set_device(self, device_index: Any) -> None:
                pass

            def synchronize(self, device_index: Any = None) -> None:
                pass

            def empty_cache(self) -> None:
                pass

            def manual_seed(self, seed: int) -> None:
                torch.manual_seed(seed)

            manual_seed_all = manual_seed

            def communication_backend_name(self) -> str:
                return "gloo"

        set_platform(CpuPlatform())
    import transformers
    import transformers.models.qwen2.modeling_qwen2
    import verl.workers.engine.fsdp.transformer_impl
    import verl.workers.engine_workers

    # verl asks whether a config is among the keys, which imports a module of every model.
    mapping = type(transformers.AutoModelForCausalLM._model_mapping)
    mapping.__iter__ = lambda self, keys=mapping.keys: iter(keys(self))
    mapping.keys = lambda self: self

    # A CUDA build of torch cannot pin memory without a driver.
    impl = verl.workers.engine.fsdp.transformer_impl
    offload = impl.CPUOffloadPolicy
    impl.CPUOffloadPolicy = lambda **kwargs: offload(pin_memory=False)
    # For every model with a value head, verl requests flash attention.
    kind = transformers.AutoModelForTokenClassification
    load = kind.from_pretrained
    kind.from_pretrained = lambda *args, **kwargs: load(
        *args, **{**kwargs, "attn_implementation": "eager"}
    )
    if LEGACY:
        import verl.workers.fsdp_workers

        # aggressive_empty_cache reports the device's memory cache, which a CPU lacks.
        verl.workers.fsdp_workers.aggressive_empty_cache = lambda **kwargs: None


def engine(
    model: str,
    *,
    param_dtype: str | None = "fp16",
    critic: bool = False,
    forward_only: bool = False,
    contents: Sequence[str] = ("model", "optimizer", "extra"),
    load: Sequence[str] | None = None,
    lora: bool = False,
    initialize: bool = True,
    overrides: Mapping[str, Any] | None = None,
    lr: float = 1e-2,
    optimizer: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Any:
    """A real FSDP2 engine of the installed verl.

    Args:
        model: folder of a tiny Hugging Face checkpoint.
        param_dtype: ``mixed_precision.param_dtype``; ``None`` for verl's default.
        critic: whether the model has a value head.
        forward_only: whether the engine is for a reference model.
        contents: ``checkpoint.save_contents``.
        load: ``checkpoint.load_contents``, if it differs from ``contents``.
        lora: whether only adapters are trained.
        initialize: whether to build the model and optimizer.
        overrides: further overrides of the model's HF config.
        lr: learning rate.
        optimizer: the optimizer's ``override_optimizer_config``.
        fields: further fields of FSDPEngineConfig.
    """
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp import transformer_impl as impl

    torch.manual_seed(11)
    options: dict[str, Any] = {"lora_rank": 4, "target_modules": "all-linear"} if lora else {}
    if critic and "model_type" in inspect.signature(HFModelConfig).parameters:
        options["model_type"] = "value_model"
    model_config = HFModelConfig(
        path=model,
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "eager", **(overrides or {})},
        **options,
    )
    if critic:
        model_config.model_type = "value_model"
    values: dict[str, Any] = {
        "strategy": "fsdp2",
        "mixed_precision": {"param_dtype": param_dtype} if param_dtype else None,
        "use_torch_compile": False,
        "use_dynamic_bsz": False,
        "forward_only": forward_only,
        **fields,
    }
    kinds = {False: impl.FSDPEngineWithLMHead, True: impl.FSDPEngineWithValueHead}
    one = kinds[critic](
        model_config,
        FSDPEngineConfig(**values),
        FSDPOptimizerConfig(
            lr=lr, total_training_steps=40, override_optimizer_config=dict(optimizer or {})
        ),
        CheckpointConfig(save_contents=list(contents), load_contents=list(load or contents)),
    )
    if initialize:
        one.initialize()
    return one


def batch(step: int, *, sequences: int = 2) -> Any:
    """This rank's batch of a step; each micro-batch is one sequence."""
    return supervised_batch(seed=1000 * step + dist.get_rank(), sequences=sequences)


def loss_function(weights: Sequence[float] = (1.0, 1.0), *, critic: bool = False) -> Callable:
    """verl's SFT loss, or a critic's squared error, with a weight for each micro-batch."""
    from verl.workers.utils.losses import sft_loss

    left = iter(weights)

    made = value_loss if critic else partial(sft_loss, None)

    def weighted(*args: Any, **kwargs: Any) -> Any:
        loss, metrics = made(*args, **kwargs)
        return loss.float() * next(left), metrics

    return weighted


HUGE = 2.0**30
"""A loss weight at which fp16 gradients overflow at every scale in these tests."""


Overflows = Collection[int] | Mapping[int, float]
"""The steps at which gradients overflow, or loss weights by step."""


def weight_at(step: int, overflows: Overflows) -> float:
    """The loss weight of a step."""
    if isinstance(overflows, Mapping):
        return overflows.get(step, 1.0)
    return HUGE if step in overflows else 1.0


def train(one: Any, steps: range, overflows: Overflows = (), *, critic: bool = False) -> list:
    """Train an engine; at the steps in ``overflows`` this rank's second micro-batch overflows.

    Returns:
        For each step: the losses of the micro-batches, and the grad norm.
    """
    said = []
    for step in steps:
        weights = (1.0, weight_at(step, overflows))
        with one.train_mode():
            found = one.train_batch(batch(step), loss_function(weights, critic=critic))
            one.lr_scheduler_step()
        said.append([*found["loss"], found["metrics"]["grad_norm"]])
    return said


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bits(tensors: Sequence[torch.Tensor]) -> str:
    """A digest of the bits of all tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(local(tensor).detach().contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def parameters(module: torch.nn.Module) -> list[torch.Tensor]:
    """Copies of this rank's shards of the parameters."""
    return [local(one).detach().clone() for one in module.parameters()]


def state(module: torch.nn.Module, optimizer: Any, scaler: Any) -> dict[str, Any]:
    """Digests of this rank's states, and figures, which are equal after two equal trainings."""
    moments = [
        value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
        for one in optimizer.state.values()
        for _, value in sorted(one.items())
    ]
    counter = getattr(scaler, "counter", None)
    inner = scaler.state_dict() if scaler is not None else {}
    return {
        "parameters": bits([one.reshape(-1) for one in parameters(module)]),
        "moments": bits([local(one).reshape(-1) for one in moments]),
        "moment_count": len(moments),
        "scale": inner.get("scale"),
        "tracker": inner.get("_growth_tracker"),
        "counter": [counter.steps, counter.skipped, counter.in_row] if counter else None,
    }


def engine_state(one: Any) -> dict[str, Any]:
    """``state`` of an engine."""
    return state(one.module, one.optimizer, getattr(one, "scaler", None))


def furthest(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> float:
    """The largest absolute difference between corresponding elements."""
    return max((a - b).abs().max().item() for a, b in zip(first, second, strict=True) if a.numel())


def training_worker(one: Any, *, critic: bool = False) -> Any:
    """verl's real ``TrainingWorker`` around an engine."""
    from verl.workers.engine import base
    from verl.workers.engine_workers import TrainingWorker

    base.EngineRegistry.new = classmethod(lambda *args, **kwargs: one)
    return TrainingWorker(training_config(one, critic=critic))


PLACES = {
    "actor": ("actor_rollout_ref.actor", "fsdp_config", "actor_rollout_ref.model"),
    "critic": ("critic", "model.fsdp_config", "critic.model"),
}
"""Where verl's config has a role's training, its FSDP section in there, and its model."""


def composed(model: str, *overrides: str, role: str = "actor") -> Any:
    """verl's shipped config of a job on FSDP2 in which a role trains a tiny model in fp16."""
    import hydra
    import verl.trainer.config as shipped

    place, sharding, owner = PLACES[role]
    words = [f"actor_rollout_ref.model.path={model}", f"critic.model.path={model}"]
    words += ["actor_rollout_ref.actor.strategy=fsdp2", "critic.strategy=fsdp2"]
    words += ["actor_rollout_ref.actor.use_torch_compile=False"]
    words += [f"{place}.ppo_mini_batch_size=4", f"{place}.ppo_micro_batch_size_per_gpu=1"]
    words += [f"{place}.optim.total_training_steps=40", f"{place}.optim.lr=1e-2"]
    words += [f"{owner}.enable_gradient_checkpointing=False", f"{owner}.use_remove_padding=False"]
    words += [f"++{owner}.override_config.attn_implementation=eager"]
    words += [f"++{place}.{sharding}.mixed_precision.param_dtype=fp16"]
    at = os.path.dirname(shipped.__file__)
    with hydra.initialize_config_dir(at, version_base=None), composed_once():
        return hydra.compose("ppo_trainer", [*words, *overrides])


class Legacy:
    """0.7.1's real legacy worker, an actor or a critic, from verl's shipped config.

    ``serves`` is verl's name of the actor's role, such as ``"actor_rollout"`` for one with rollout.
    """

    def __init__(
        self, model: str, role: str = "actor", *overrides: str, serves: str = "actor"
    ) -> None:
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker

        fp16 = [f"{PLACES[role][0]}.fsdp_config.dtype=float16"] if role == "actor" else []
        config = composed(model, *fp16, *overrides, role=role)
        torch.manual_seed(11)
        if role == "actor":
            self.worker = ActorRolloutRefWorker(config.actor_rollout_ref, serves)
        else:
            self.worker = CriticWorker(omega_conf_to_dataclass(config.critic))
        self.role = role
        self.worker.init_model()

    @property
    def inner(self) -> Any:
        """verl's DataParallelPPOActor or DataParallelPPOCritic."""
        return getattr(self.worker, self.role)

    @property
    def optimizer(self) -> Any:
        """The optimizer of the worker's model."""
        return getattr(self.inner, f"{self.role}_optimizer")

    @property
    def module(self) -> Any:
        """The sharded module of the worker."""
        return getattr(self.inner, f"{self.role}_module")

    def train(self, steps: range, overflows: Overflows = ()) -> list:
        """Call ``update_policy`` or ``update_critic``; returns verl's metrics of each step."""
        said = []
        for step in steps:
            data = self._batch(step, weight_at(step, overflows))
            update = {"actor": "update_policy", "critic": "update_critic"}[self.role]
            said.append(dict(getattr(self.inner, update)(data)))
            getattr(self.worker, f"{self.role}_lr_scheduler").step()
        return said

    def _batch(self, step: int, weight: float) -> Any:
        from verl import DataProto

        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        size, length, answer = 2, 9, 4
        tokens = torch.randint(3, VOCABULARY, (size, length), generator=generator)
        ones = torch.ones(size, answer)
        floats = {
            name: torch.rand(size, answer, generator=generator)
            for name in ("advantages", "values", "returns")
        }
        # Large advantages or distant returns make large gradients, in one micro-batch only.
        factor = torch.tensor([[1.0], [weight]])
        floats = {name: value * factor for name, value in floats.items()}
        return DataProto.from_dict(
            tensors={
                "input_ids": tokens,
                "responses": tokens[:, -answer:],
                "attention_mask": torch.ones_like(tokens),
                "position_ids": torch.arange(length).expand(size, length),
                "response_mask": ones,
                "old_log_probs": torch.full((size, answer), -4.0),
                "ref_log_prob": torch.full((size, answer), -4.0),
                **floats,
            },
            meta_info={"temperature": 1.0, "pad_token_id": 0, "global_token_num": [18]},
        )

    def state(self) -> dict[str, Any]:
        """``state`` of the worker's model."""
        return state(self.module, self.optimizer, getattr(self.inner, "scaler", None))


def folder_of(path: str) -> list[str]:
    """The file names in a checkpoint's directory."""
    return sorted(one.name for one in Path(path).iterdir())
