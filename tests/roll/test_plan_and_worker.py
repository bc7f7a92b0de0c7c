"""Values that ROLL's config classes accept and its workers refuse: plan and worker agree."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from precision_shim.precision.dtypes import CANONICAL

from ..plan.models import QWEN25_7B
from . import jobs
from . import sharded as live
from .driving import Trainer
from .test_plan import plan

__all__ = ["plan"]
pytestmark = pytest.mark.usefixtures("one_process")
WHERE = {
    "strategy": "actor_train.strategy_args.strategy_config",
    "training": "actor_train.training_args",
    "model": "actor_train.model_args",
}


def keys(found: Any) -> list[str]:
    return [one["key"] for one in found["problems"]]


def job(strategy: str, written: dict[str, Any], training: dict[str, Any]) -> dict[str, Any]:
    values = jobs.config(strategy=strategy, **written)
    values["actor_train"]["training_args"] = training
    return values


@pytest.mark.parametrize(
    ("key", "written", "training"),
    [
        ("training.lr_scheduler_type", {}, {"lr_scheduler_type": "polynomial"}),
        ("training.learning_rate", {}, {"learning_rate": -1.0}),
        ("training.learning_rate", {"lr_scheduler_kwargs": {"min_lr": 1.0}}, {}),
        ("training.weight_decay", {}, {"weight_decay": -1.0}),
        ("strategy.weight_decay", {"weight_decay": None}, {}),
        ("strategy.learning_rate", {"learning_rate": "abc"}, {}),
        ("strategy.lr_scheduler_kwargs", {"lr_scheduler_kwargs": None}, {}),
        ("strategy.lr_scheduler_kwargs.min_lr", {"lr_scheduler_kwargs": {"min_lr": -1.0}}, {}),
        ("strategy.lr_scheduler_kwargs.min_lr", {"lr_scheduler_kwargs": {"min_lr": "abc"}}, {}),
        ("strategy.lr_scheduler_kwargs.init_lr", {"lr_scheduler_kwargs": {"init_lr": 1.0}}, {}),
        ("strategy.lr_scheduler_kwargs.max_lr", {"lr_scheduler_kwargs": {"max_lr": -1.0}}, {}),
        (
            "strategy.lr_scheduler_kwargs.lr_decay_steps",
            {"lr_scheduler_kwargs": {"lr_decay_steps": 0}},
            {},
        ),
        (
            "strategy.lr_scheduler_kwargs.wsd_decay_steps",
            {},
            {"lr_scheduler_type": "warmup_stable_decay"},
        ),
        (
            "strategy.overlap_param_gather",
            {"overlap_param_gather": True, "overlap_grad_reduce": True},
            {},
        ),
    ],
)
def test_values_that_rolls_megatron_strategy_refuses(
    plan: Any, key: str, written: dict[str, Any], training: dict[str, Any]
) -> None:
    code, found = plan(job("megatron_train", written, training))
    place, _, name = key.partition(".")
    assert (code, keys(found)) == (1, [f"{WHERE[place]}.{name}"])
    with pytest.raises((ValueError, TypeError, AttributeError, AssertionError)):
        Trainer.of(torch.bfloat16, **written, training_args=training)


def test_values_that_megatrons_groups_refuse(plan: Any) -> None:
    key = f"{WHERE['strategy']}.virtual_pipeline_model_parallel_size"
    code, found = plan(jobs.config(virtual_pipeline_model_parallel_size=2))
    assert (code, keys(found)) == (1, [key])
    code, found = plan({**jobs.config(), "seed": 0})
    assert (code, keys(found)) == (1, ["seed"])
    own = importlib.import_module("mcore_adapter.initialize")
    with pytest.raises(UnboundLocalError):
        own._set_random_seed(0)


@pytest.mark.parametrize(
    ("key", "written", "training", "ulysses"),
    [
        ("training.adam_beta1", {}, {"adam_beta1": 1.5}, 1),
        ("training.adam_beta2", {}, {"adam_beta2": 1.0}, 1),
        ("training.learning_rate", {}, {"learning_rate": -1.0}, 1),
        ("training.weight_decay", {}, {"weight_decay": -1.0}, 1),
        ("training.lr_scheduler_type", {}, {"lr_scheduler_type": "abc"}, 1),
        ("training.lr_scheduler_type", {}, {"lr_scheduler_type": "cosine_with_min_lr"}, 1),
        ("strategy.reshard_after_forward", {"reshard_after_forward": 3}, {}, 1),
        ("strategy.fsdp_size", {"fsdp_size": "8"}, {}, 1),
        ("model.ulysses_size", {}, {}, 0),
        ("model.ulysses_size", {}, {}, None),
    ],
)
def test_values_that_rolls_fsdp2_strategy_refuses(
    plan: Any,
    tmp_path: Path,
    key: str,
    written: dict[str, Any],
    training: dict[str, Any],
    ulysses: Any,
) -> None:
    values = job("fsdp2_train", written, training)
    values["actor_train"]["model_args"]["ulysses_size"] = ulysses
    code, found = plan(values)
    place, _, name = key.partition(".")
    expected = f"{WHERE[place]}.{name}"
    assert keys(found) == [expected] if code == 1 else f"{expected}=" in found
    with pytest.raises((ValueError, TypeError, AssertionError, ZeroDivisionError)):
        live.Trainer.of(tmp_path / "model", "bf16", ulysses, training_args=training, **written)


@pytest.mark.parametrize("dtype", ["fp64", "Float64", "bf16"])
@pytest.mark.parametrize("reduce", [None, "fp64"])
def test_dtypes_that_rolls_fsdp2_strategy_takes(
    plan: Any, tmp_path: Path, dtype: str, reduce: str | None
) -> None:
    code, found = plan(job("fsdp2_train", {"param_dtype": dtype, "reduce_dtype": reduce}, {}))
    assert code == 0
    (actor,) = found["models"]
    strategy = live.Trainer.of(tmp_path / "model", dtype, reduce_dtype=reduce).strategy
    assert named(actor["computes"]) is strategy.param_dtype
    assert named(actor["reduces"]) is (strategy.reduce_dtype or strategy.param_dtype)


def named(dtype: str) -> torch.dtype:
    found = CANONICAL.get(dtype) or getattr(torch, dtype)
    assert isinstance(found, torch.dtype)
    return found


def test_a_dtype_in_which_no_model_is_made(plan: Any) -> None:
    code, found = plan(job("fsdp2_train", {"param_dtype": "float8_e4m3fn"}, {}))
    assert (code, keys(found)) == (1, [f"{WHERE['strategy']}.param_dtype"])
    with pytest.raises(TypeError, match="Float8"):
        importlib.import_module("transformers").LlamaForCausalLM._from_config(
            live.tiny(), dtype=torch.float8_e4m3fn
        )


def test_the_checkpoints_dtype_is_not_planned(plan: Any) -> None:
    code, found = plan(job("fsdp2_train", {"param_dtype": None}, {}))
    assert (code, "param_dtype=None" in found) == (2, True)


def test_critics_that_roll_cannot_make(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """ROLL has no value model on Megatron, and two kinds on FSDP2."""
    providers = importlib.import_module("roll.models.model_providers")
    names = ("download_model", "prepare_automap_files")
    for name in names:
        monkeypatch.setattr(providers, name, lambda path: path)
    make = providers.default_value_model_provider
    given = SimpleNamespace(model_name_or_path="none", compute_dtype=None, device_map=None)
    args = importlib.import_module("mcore_adapter").TrainingArguments(use_cpu=True)
    values = jobs.config()
    for strategy, kind, key in (
        ("megatron_train", None, "critic.strategy_args.strategy_name"),
        ("fsdp2_train", None, "critic.model_args.model_type"),
        ("fsdp2_train", "auto_sequence_classification", "critic.model_args.model_type"),
    ):
        critic = jobs.config(strategy=strategy)["actor_train"]
        critic["model_args"] = {} if kind is None else {"model_type": kind}
        code, found = plan({**values, "adv_estimator": "gae", "critic": critic})
        assert (code, keys(found)) == (1, [key])
        given.model_type = kind
        with pytest.raises(NotImplementedError):
            make(None, given, args if strategy == "megatron_train" else None)


def test_sizes_in_additional_configs(plan: Any, tmp_path: Path) -> None:
    """mcore_adapter takes from ``additional_configs`` what ``strategy_config`` leaves out."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN25_7B))
    values = jobs.config(additional_configs={"tensor_model_parallel_size": 4, "num_layers": 2})
    code, found = plan(values)
    (actor,) = found["models"]
    assert (code, actor["layout"]["tp"], actor["layout"]["dp"]) == (0, 4, 2)
    assert any("additional_configs (num_layers)" in one for one in actor["notes"])
    ends = {"num_layers_in_first_pipeline_stage": 4}
    values = jobs.config(pipeline_model_parallel_size=2, additional_configs=ends)
    values["pretrain"] = str(tmp_path)
    code, found = plan(values, options=("--model", str(tmp_path)))
    key = f"{WHERE['strategy']}.additional_configs.num_layers_in_first_pipeline_stage"
    assert (code, keys(found)) == (1, [key])
    values = jobs.config(pipeline_model_parallel_size=8)
    code, found = plan(values, options=("--model", str(tmp_path)))
    assert (code, "num_layers_in_last" in json.dumps(found)) == (1, False)


def test_experts_turn_sequence_parallelism_on(plan: Any, tmp_path: Path) -> None:
    experts = {**QWEN25_7B, "num_experts": 8, "moe_intermediate_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(experts))
    options = ("--model", str(tmp_path))
    two = {"tensor_model_parallel_size": 2}
    code, found = plan(jobs.config(**two), options=options)
    assert (code, keys(found)) == (1, [f"{WHERE['strategy']}.sequence_parallel"])
    code, _ = plan(jobs.config(**two, expert_model_parallel_size=2), options=options)
    assert code == 0


def test_settings_that_are_noted(plan: Any) -> None:
    written = {"optimizer_cpu_offload": True, "fp8": "hybrid", "mtp_num_layers": 1}
    values = jobs.config(**written)
    values["actor_train"]["model_args"]["freeze_module_prefix"] = "embedding"
    code, found = plan(values)
    said = " ".join(found["models"][0]["notes"])
    assert code == 0
    assert all(word in said for word in (*written, "freeze_module_prefix"))
    values = job("fsdp2_train", {}, {})
    given = values["actor_train"]["model_args"]
    given.update(freeze_module_prefix="model.embed_tokens", model_config_kwargs={"abc": 1})
    code, found = plan(values)
    said = " ".join(found["models"][0]["notes"])
    assert (code, "freeze_module_prefix" in said, "(abc)" in said) == (0, True, True)
    given["freeze_module_prefix"] = ""
    assert keys(plan(values)[1]) == [f"{WHERE['model']}.freeze_module_prefix"]
