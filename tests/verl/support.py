"""Shared by the verl tests: batches, configs, and real Megatron engines on a CPU."""

from __future__ import annotations

import contextlib
import functools
import inspect
import queue
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from precision_shim_tools.testing.megatron_cpu import CPU_TRANSFORMER

from ..stand_ins.tiny_models import VOCABULARY

CPU_FIELDS = {**CPU_TRANSFORMER, "attention_backend": "unfused"}
"""The fields that verl's override_transformer_config needs on a CPU."""


def batch(*, seed: int = 0, sequences: int = 2, length: int = 9) -> Any:
    """A batch like those of verl's trainers: jagged token ids, and the fields that losses read."""
    import torch
    import verl.utils.tensordict_utils as tu

    generator = torch.Generator().manual_seed(seed)

    def jagged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)

    tokens = [
        torch.randint(3, VOCABULARY, (length,), generator=generator) for _ in range(sequences)
    ]
    return tu.get_tensordict(
        tensor_dict={
            "input_ids": jagged(tokens),
            "position_ids": jagged([torch.arange(length) for _ in tokens]),
            "loss_mask": jagged([torch.ones(length) for _ in tokens]),
            "returns": jagged([torch.rand(length, generator=generator) for _ in tokens]),
            "temperature": torch.ones(sequences),
        },
        non_tensor_dict={
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": 1,
            "use_fused_kernels": False,
            "use_remove_padding": False,
        },
    )


def optim_config(**fields: Any) -> Any:
    """verl's own McoreOptimizerConfig, with defaults for the tests."""
    from verl.workers.config import McoreOptimizerConfig

    values: dict[str, Any] = {"lr": 1e-3, "min_lr": 0.0, "clip_grad": 1.0, "weight_decay": 0.01}
    return McoreOptimizerConfig(total_training_steps=10, **(values | fields))


def value_loss(model_output: Any, data: Any, dp_group: Any = None) -> tuple[Any, dict[str, Any]]:
    """Squared error of the values; verl's own loss needs the trainer's padded fields."""
    values = model_output["values"]
    values = values.values() if values.is_nested else values
    error = values.float().flatten() - data["returns"].values().float().flatten()
    return error.square().mean(), {}


def training_config(one: Any, *, critic: bool) -> Any:
    """The config of verl's ``TrainingWorker`` for an engine; old versions have fewer fields."""
    from verl.workers.config import TrainingWorkerConfig

    names = ("model_config", "engine_config", "optimizer_config", "checkpoint_config")
    fields = {name: getattr(one, name) for name in names}
    fields["model_type"] = "value_model" if critic else "language_model"
    known = inspect.signature(TrainingWorkerConfig).parameters
    return TrainingWorkerConfig(**{key: value for key, value in fields.items() if key in known})


def engine(
    checkpoint: Path,
    dtype: str,
    *,
    critic: bool = False,
    optim: Any = None,
    ddp: dict[str, Any] | None = None,
    bridge: bool = False,
    overrides: dict[str, Any] | None = None,
    **config: Any,
) -> Any:
    """A real MegatronEngine of the installed verl, not yet initialized.

    Args:
        checkpoint: folder from ``make_checkpoint``.
        dtype: the engine's dtype. verl's own check accepts only ``"bfloat16"`` and ``"float16"``;
            ``"float32"`` is set in the config after the check.
        critic: whether to make the engine with a value head.
        optim: a McoreOptimizerConfig; ``None`` for verl's defaults.
        ddp: ``override_ddp_config``.
        bridge: whether to build through Megatron-Bridge's provider instead of mbridge.
        overrides: overrides of the model's HF config.
        config: further fields of McoreEngineConfig.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig
    from verl.workers.engine.megatron import transformer_impl as impl

    transformer: dict[str, Any] = dict(CPU_FIELDS)
    if bridge:
        transformer["transformer_layer_spec"] = get_gpt_layer_local_spec(normalization="RMSNorm")
    transformer |= config.pop("override_transformer_config", {})
    known = inspect.signature(McoreEngineConfig).parameters
    values: dict[str, Any] = {
        "dtype": "bfloat16" if dtype == "float32" else dtype,
        "vanilla_mbridge": not bridge,
        "override_ddp_config": dict(ddp or {}),
        "override_transformer_config": transformer,
        "use_remove_padding": False,
        **config,
    }
    options: dict[str, Any] = {"override_config": overrides or {}}
    kinds = {False: "MegatronEngineWithLMHead", True: "MegatronEngineWithValueHead"}
    if critic and "model_type" in inspect.signature(HFModelConfig).parameters:
        options["model_type"] = "value_model"
    model_config = HFModelConfig(path=str(checkpoint), use_remove_padding=False, **options)
    engine_config = McoreEngineConfig(
        **{key: value for key, value in values.items() if key in known}
    )
    object.__setattr__(engine_config, "dtype", dtype)
    return getattr(impl, kinds[critic])(
        model_config=model_config,
        engine_config=engine_config,
        optimizer_config=optim_config() if optim is None else optim,
        checkpoint_config=CheckpointConfig(
            save_contents=["optimizer", "extra"], load_contents=["optimizer", "extra"]
        ),
    )


NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Names of Megatron's own norms, and of TransformerEngine's, which are part of another layer."""


def save_without_a_manager() -> None:
    """Replace the manager process of Megatron's saves by a plain queue, which is enough here.

    Each process that saves would start one, which takes longer than a test's training.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    assert filesystem_async._results_queue is None
    filesystem_async._results_queue = queue.Queue()


@contextlib.contextmanager
def local_layers(*, weights: bool = False) -> Iterator[None]:
    """Bridges ask for TransformerEngine's layers; give them Megatron's own, which run on a CPU.

    Megatron's own layers name their norms differently from TransformerEngine's fused ones, so
    mbridge's map of weight names does not fit them. verl marks the tokens that are no padding, as
    TransformerEngine's attention takes it; Megatron's own attends to what is not marked. It gets no
    mask and makes its causal one: all padding is on the right, where no token attends to it.

    Args:
        weights: translate the names of the norms, so that mbridge loads, exports and saves the
            weights; otherwise they stay as they were initialized.
    """
    from mbridge.core import bridge, llm_bridge, util
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from verl.utils import megatron_utils

    attend = DotProductAttention.forward

    @functools.wraps(attend)
    def causal(self: Any, query: Any, key: Any, value: Any, mask: Any, **named: Any) -> Any:
        return attend(self, query, key, value, None, **named)

    own = llm_bridge.get_gpt_decoder_block_spec

    @functools.wraps(own)
    def local(config: Any, use_transformer_engine: bool = True, **kwargs: Any) -> Any:
        return own(config, use_transformer_engine=False, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm_bridge, "get_gpt_decoder_block_spec", local)
        patch.setattr(DotProductAttention, "forward", causal)
        if weights:
            named = bridge.Bridge._weight_name_mapping_mcore_to_hf

            def mapped(self: Any, name: str) -> Any:
                for ours, theirs in NORMS.items():
                    name = name.replace(f".{ours}", f".{theirs}")
                return named(self, name)

            patch.setattr(bridge.Bridge, "_weight_name_mapping_mcore_to_hf", mapped)
        else:
            patch.setattr(bridge.Bridge, "load_weights", lambda *args, **kwargs: None)
        if not hasattr(util.ModelType, "encoder_and_decoder"):
            # mbridge 0.15.1 and verl before 0.9 still compare with a model type that megatron-core
            # 0.17 removed.
            known = SimpleNamespace(
                encoder_or_decoder=util.ModelType.encoder_or_decoder, encoder_and_decoder=object()
            )
            patch.setattr(util, "ModelType", known)
            patch.setattr(megatron_utils, "ModelType", known)
        yield
