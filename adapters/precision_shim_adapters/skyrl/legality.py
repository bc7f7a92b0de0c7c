"""Check the values of a SkyRL model's config that SkyRL's loader does not check."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from precision_shim.adapting import versioned
from precision_shim.planning.record import Problem, no_number
from precision_shim.planning.values import no_section, said

from ..fp16.legality import of_reshard, of_wrap_policy, refusal

SCHEDULER = "constant_with_warmup"
"""SkyRL's default scheduler, and the only one on Megatron."""

_STEPS = 100
"""The arbitrary number of training steps with which the plan makes a scheduler."""

_LAYERS = (
    *("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "num_query_groups"),
    *("kv_channels", "num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk"),
)
"""The sizes of the model in Megatron's transformer config; the first three must not be null."""

_PARALLEL = ("tensor_model", "pipeline_model", "context", "expert_model")


def of_optimizer(trainer: Any, role: str, *, on_megatron: bool) -> Iterator[Problem]:
    """For a trained model, yield a problem for each optimizer setting that would end the job.

    Raises:
        PlanError: the optimizer's section has no keys.
    """
    section = getattr(trainer, role).optimizer_config
    place = f"trainer.{role}.optimizer_config"
    if not hasattr(section, "__dict__"):
        raise no_section(section, place, versioned("skyrl"))
    needed = ["max_grad_norm"]
    if on_megatron:
        needed += ["lr", "weight_decay", "num_warmup_steps"]
    values = {**{name: getattr(type(section), name, 0.0) for name in needed}, **vars(section)}
    kwargs = getattr(trainer, role).megatron_config.optimizer_config_kwargs if on_megatron else None
    for name in needed:
        value = values[name]
        over = name == "max_grad_norm" and "clip_grad" in (kwargs or {})
        if not (isinstance(value, int | float) or over):
            yield no_number(value, role, f"{place}.{name}")
            return
    betas = values.get("adam_betas", (0.9, 0.999))
    pair = isinstance(betas, list | tuple) and len(betas) == 2
    if not (pair and all(isinstance(beta, int | float) for beta in betas)):
        key = f"{place}.adam_betas"
        fault = f"{betas!r} is no pair of numbers"
        yield Problem("number", role, key, fault, "Write two numbers.")
    elif on_megatron:
        yield from _scheduled_by_megatron(values, role, place)
    else:
        yield from _made_by_torch(values, role, place)


def _scheduled_by_megatron(values: dict[str, Any], role: str, place: str) -> Iterator[Problem]:
    """Yield a problem for each value that Megatron's scheduler refuses with an assertion."""
    if values.get("scheduler", SCHEDULER) != SCHEDULER:
        fault = f"{values['scheduler']!r}: on Megatron SkyRL has {SCHEDULER} only"
        yield Problem("number", role, f"{place}.scheduler", fault, f"Write {SCHEDULER}.")
    least = "Write 0 or more."
    for name in ("lr", "weight_decay"):
        if values[name] < 0:
            yield Problem("number", role, f"{place}.{name}", f"{values[name]} is below 0", least)


def _made_by_torch(values: dict[str, Any], role: str, place: str) -> Iterator[Problem]:
    """Yield a problem for each value that torch's AdamW or the scheduler refuses."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    for name, argument in (("lr", "lr"), ("weight_decay", "weight_decay"), ("adam_betas", "betas")):
        error = refusal(torch.optim.AdamW, argument, values[name]) if name in values else None
        if error is not None:
            yield Problem("number", role, f"{place}.{name}", error, "Correct it.")
    kind, warm = values.get("scheduler", SCHEDULER), values.get("num_warmup_steps", 0)
    if kind == SCHEDULER and isinstance(warm, int | float):
        return
    try:
        from transformers.optimization import get_scheduler

        get_scheduler(kind, optimizer, num_warmup_steps=warm, num_training_steps=_STEPS)
    except ImportError:
        return
    except Exception as refused:  # transformers raises various errors
        name = "scheduler" if isinstance(warm, int | float) else "num_warmup_steps"
        yield Problem("number", role, f"{place}.{name}", said(refused), "Correct it.")


def of_fsdp(config: Any, role: str, shards: int) -> Iterator[Problem]:
    """Yield a problem for each value that torch's ``fully_shard`` or SkyRL's wrapping refuses.

    Args:
        config: the role's ``fsdp_config``.
        role: the model's key in the config.
        shards: the number of ranks over which a parameter is sharded.
    """
    key = f"trainer.{role}.fsdp_config"
    reshard = getattr(config, "reshard_after_forward", None)
    yield from of_reshard(reshard, f"{key}.reshard_after_forward", role, shards)
    yield from of_wrap_policy(getattr(config, "wrap_policy", {}), f"{key}.wrap_policy", role)


def of_transformer(config: Any, role: str, provider: Any) -> Iterator[Problem]:
    """Yield a problem for each value of ``transformer_config_kwargs`` that Megatron refuses.

    Args:
        config: the role's ``megatron_config``.
        role: the model's key in the config.
        provider: from ``megatron.foreseen_provider``.
    """
    written, place = _transformer(config, role)
    if provider.fp16 and provider.bf16:
        yield Problem(
            "flags",
            role,
            f"{place}.fp16" if "fp16" in written else f"{place}.bf16",
            f"fp16={provider.fp16} and bf16={provider.bf16}: Megatron takes one of them, and the "
            "other one comes from the checkpoint or trainer.bf16",
            f"Leave it out, or write {place}.fp16 and {place}.bf16.",
        )
    for name in (f"{kind}_parallel_size" for kind in _PARALLEL):
        if getattr(config, name, 1) is None:
            key = f"trainer.{role}.megatron_config.{name}"
            yield Problem("size", role, key, "None is no whole number", "Write 1 or more.")
    for name in _LAYERS:
        value = written.get(name, 1)
        if not (isinstance(value, int) or (value is None and name not in _LAYERS[:3])):
            fault = f"{value!r} is no whole number"
            yield Problem("number", role, f"{place}.{name}", fault, "Write a whole number.")


def notes_of_transformer(config: Any, role: str, checkpoint: str) -> Iterator[str]:
    """Yield a note for each ``transformer_config_kwargs`` value that the plan cannot check.

    Args:
        config: the role's ``megatron_config``.
        role: the model's key in the config.
        checkpoint: canonical name of the checkpoint's dtype; empty if it is not known.
    """
    written, place = _transformer(config, role)
    if written.get("fp16") and "bf16" not in written and not checkpoint:
        yield (
            f"{place}.fp16: Megatron refuses it beside a bf16 checkpoint, and the checkpoint is "
            f"not on this machine; {place}.bf16=false allows it"
        )
    shaped = [name for name in _LAYERS if isinstance(written.get(name), int)]
    for name in shaped:
        yield f"not counted: {place}.{name}={written[name]}; the sizes are the checkpoint's"


def _transformer(config: Any, role: str) -> tuple[Any, str]:
    place = f"trainer.{role}.megatron_config.transformer_config_kwargs"
    return config.transformer_config_kwargs or {}, place
