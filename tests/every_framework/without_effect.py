"""Dtype keys without effect: each framework's tests build its real worker with each key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

import precision_shim
from precision_shim.errors import InconsistentPrecisionError
from precision_shim.precision.effect import CODE

from .shim_warnings import ours


@dataclass(frozen=True)
class Case:
    """A config with keys that have no effect.

    Attributes:
        framework: the framework's name.
        engine: what the framework trains on, such as ``"fsdp"``.
        written: the keys that the test writes into the framework's config.
        told: words of the message about the first key; about other keys there is none.
        install: arguments of ``install``.
    """

    framework: str
    engine: str
    written: Mapping[str, Any]
    told: tuple[str, ...]
    install: Mapping[str, Any] = field(default_factory=dict)


AWARE, BUCKET = "use_precision_aware_optimizer", "grad_reduce_in_fp32"
_OVERRIDE = "override_optimizer_config"
_LOW = {AWARE: True, "main_grads_dtype": "bf16"}
_MIXED = "mixed_precision"

CASES = (
    Case(
        "verl",
        "megatron",
        {"optim": {"exp_avg_dtype": "bf16"}},
        ("optim.exp_avg_dtype=bf16", "exp_avg is fp32", f"Write optim.{AWARE}=true"),
    ),
    Case(
        "verl",
        "megatron",
        {"optim": {"exp_avg_dtype": "bf16", AWARE: True, _OVERRIDE: {"exp_avg_dtype": "fp32"}}},
        ("optim.exp_avg_dtype=bf16", f"as {_OVERRIDE}.exp_avg_dtype=fp32 says"),
    ),
    Case(
        "verl",
        "megatron",
        {"dtype": "float16", "optim": {"exp_avg_sq_dtype": "bf16", AWARE: True}},
        ("optim.exp_avg_sq_dtype=bf16", f"Write optim.{_OVERRIDE}.exp_avg_sq_dtype=bf16"),
    ),
    Case(
        "verl",
        "megatron",
        {"optim": {_OVERRIDE: {**_LOW}}, "ddp": {BUCKET: True}},
        (f"{_OVERRIDE}.main_grads_dtype=bf16", "buckets are fp32", f"Write {BUCKET}=False"),
    ),
    Case(
        "verl",
        "megatron",
        {"optim": {_OVERRIDE: {"params_dtype": "fp32"}}},
        (f"{_OVERRIDE}.params_dtype=fp32", "parameters are bf16"),
        {"features": ["audit", "dtype-coercion"]},  # another feature checks the same key before
    ),
    Case(
        "verl",
        "fsdp",
        {"dtype": "float16"},
        ("fsdp_config.dtype=float16", f"Write fsdp_config.{_MIXED}.param_dtype=fp16"),
    ),
    Case(
        "verl",
        "fsdp",
        {"dtype": "float16", _MIXED: {"param_dtype": "fp32"}},
        ("fsdp_config.dtype=float16", f"as fsdp_config.{_MIXED}.param_dtype=fp32 says"),
    ),
    Case(
        "verl",
        "fsdp",
        {_MIXED: {"reduce_dtyp": "bf16"}},
        (f"{_MIXED}.reduce_dtyp=bf16", f"Write fsdp_config.{_MIXED}.reduce_dtype=bf16"),
    ),
    Case(
        "verl",
        "fsdp",
        {"wrap_policy": {"param_dtype": "fp16"}},
        ("wrap_policy.param_dtype=fp16", f"Write fsdp_config.{_MIXED}.param_dtype=fp16"),
    ),
    Case(
        "skyrl",
        "fsdp",
        {f"fsdp_config.{_MIXED}.buffer_dtype": "bf16"},
        (f"fsdp_config.{_MIXED}.buffer_dtype=bf16", "nothing reads this key"),
    ),
    *(
        Case(
            "skyrl",
            "fsdp",
            {f"megatron_config.{key}": value},
            (f"megatron_config.{key}={value}", "nothing reads this key", "trainer.strategy="),
        )
        for key, value in (
            ("optimizer_config_kwargs.exp_avg_dtype", "bf16"),
            ("transformer_config_kwargs.params_dtype", "bf16"),
            (f"ddp_config.{BUCKET}", "False"),
        )
    ),
    Case(
        "skyrl",
        "megatron",
        {"megatron_config.transformer_config_kwargs.params_dtype": "fp32"},
        ("params_dtype=fp32", "the parameters are bf16", "Write trainer.bf16=false"),
    ),
    Case(
        "skyrl",
        "megatron",
        {f"fsdp_config.{_MIXED}.param_dtype": "fp16"},
        (f"fsdp_config.{_MIXED}.param_dtype=fp16", "the parameters are bf16", "trainer.bf16=false"),
    ),
    Case(
        "skyrl",
        "megatron",
        {
            "megatron_config.optimizer_config_kwargs.main_grads_dtype": "bf16",
            f"megatron_config.optimizer_config_kwargs.{AWARE}": "true",
            f"megatron_config.ddp_config.{BUCKET}": "true",
        },
        ("optimizer_config_kwargs.main_grads_dtype=bf16", f"Write {BUCKET}=False"),
    ),
    Case(
        "nemo-rl",
        "megatron",
        {"optimizer": {"main_grads_dtype": "float32"}, "ddp": {BUCKET: False}},
        ("policy.megatron_cfg.optimizer.main_grads_dtype=float32", f"Write {BUCKET}=True"),
    ),
    Case(
        "torchtitan",
        "fsdp",
        {"mixed_precision_param": "float32"},
        ("training.mixed_precision_param=float32", "the layers compute in bf16"),
    ),
    Case(
        "areal",
        "megatron",
        {"grad_reduce_dtype": "bfloat16"},
        ("actor.grad_reduce_dtype=bfloat16", f"Write megatron.ddp.{BUCKET}=false"),
    ),
    Case(
        "areal",
        "megatron",
        {"dtype": "float16", "optimizer": {"type": "adam_bf16"}},
        ("actor.dtype=float16", "the parameters are bf16"),
    ),
    Case(
        "ms-swift",
        "megatron",
        {**_LOW, "bf16": True, "accumulate_allreduce_grads_in_fp32": True},
        ("main_grads_dtype=torch.bfloat16", "buckets are fp32"),
    ),
    Case(
        "roll",
        "fsdp",
        {"dtype": "fp16"},
        ("actor_train.model_args.dtype=fp16", "strategy_config.param_dtype=fp16"),
    ),
    *(
        Case(
            name,
            "megatron",
            {
                "--exp-avg-dtype": "bf16",
                "--use-precision-aware-optimizer": "",
                "--optimizer-cpu-offload": "",
            },
            ("flags.exp_avg_dtype=torch.bfloat16", "Write flags.optimizer_cpu_offload=False"),
        )
        for name in ("slime", "miles")
    ),
    Case(
        "miles",
        "megatron",
        {"stream_optimizer_state_moment_dtype": "bf16"},
        ("stream_optimizer_state_moment_dtype=bf16", "stream_optimizer_state_to_disk"),
    ),
)


def cases(framework: str, engine: str) -> Any:
    """The cases of a framework, as the argument ``case`` of a test."""
    found = [one for one in CASES if (one.framework, one.engine) == (framework, engine)]
    return pytest.mark.parametrize("case", found, ids=lambda one: f"{one.told[0]}")


def hold(case: Case, build: Callable[[], object], **install: Any) -> None:
    """The worker warns, the audit has the problem, strict raises: the same words in all three."""
    install = {**install, **case.install}
    with ours() as said:
        precision_shim.install(strict=False, **install)
        made = build()  # ``status()`` forgets the audits of objects that are gone
    problems = [
        one.message
        for audit in precision_shim.status().audit
        for one in audit.problems
        if one.code == CODE
    ]
    del made
    precision_shim.uninstall()
    agree(case, problems, said)
    precision_shim.install(strict=True, **install)
    with ours(), pytest.raises(InconsistentPrecisionError) as raised:
        build()
    assert problems[0] in str(raised.value)


def agree(case: Case, problems: Iterable[str], said: Iterable[str]) -> None:
    """The one problem of an audit has the case's words, and one warning has the problem."""
    (problem,) = set(problems)
    assert [word for word in case.told if word not in problem] == [], problem
    assert sum(problem in text for text in said) == 1, (problem, said)
