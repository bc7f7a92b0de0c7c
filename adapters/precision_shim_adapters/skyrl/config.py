"""The one reader of SkyRL's config, for workers, the driver and the plan.

A model is a section of ``trainer``: its ``role`` is ``"policy"``, ``"ref"`` or ``"critic"``.
``directory`` is the model's, if it is not the directory in the config.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from precision_shim.adapting import look, versioned
from precision_shim.adapting.dtypes import (
    COMPUTES,
    DTYPES,
    REDUCES,
    Written,
    name_of,
    names_precision,
    parse_dtype,
)
from precision_shim.adapting.rollouts import AUTO, ENGINE_NAMES, FP8, Engine, Format, formats

from ..agreement import model_files
from ..agreement.lm_head import IsInForce
from ..agreement.names import engine_name, with_rounded
from ..megatron import DISPATCH, GROUP, PRECISION_AWARE, RequestedConfig
from ..megatron.policy.formats import read_format
from ..megatron.policy.requested import SETS
from ..torch_fp16 import FEATURE as FSDP_SCALING
from ..torch_fp16.names import own_dtype, unscaled

BUCKET = "grad_reduce_in_fp32"
KWARGS = "optimizer_config_kwargs"
LAYERS = "transformer_config_kwargs"
MODEL_DTYPE = "model_dtype"
INFERENCE = "generator.inference_engine"
"""The config section of the inference engines, with the key ``model_dtype``."""
KEY = f"{INFERENCE}.{MODEL_DTYPE}"

MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
"""The keys of ``mixed_precision`` that SkyRL reads, and SkyRL's default dtypes for them."""

_WIRES = {"blockwise": (formats.BLOCKS, formats.ROWS), "mxfp8": (formats.MX, formats.MX)}
"""Maps ``fp8_weight_sync_mode`` to what shares a scale in weights and in activations."""

OVER = ("engine_init_kwargs", "prefill_init_kwargs", "decode_init_kwargs")
"""Sections that override SkyRL's engine settings; before 0.4 only the first exists."""

FSDP = "fsdp"
"""The group of the seams on the FSDP workers."""

OPTIMIZER = "skyrl.backends.skyrl_train.distributed.megatron.optimizer:init_megatron_optim_config"
_MTP = "skyrl.backends.skyrl_train.mtp.grad_clip:install_mtp_separate_grad_clip"
_WORKER = "skyrl.backends.skyrl_train.workers.megatron.megatron_worker:MegatronWorker"
ADAPTER_STORE = "skyrl.backends.skyrl_train.workers.megatron.adapter_store:AdapterStore"
_LINEAR = (
    *("linear_qkv", "linear_q", "linear_k", "linear_v", "linear_proj"),
    *("linear_fc1", "linear_fc1_gate", "linear_fc1_up", "linear_fc2"),
)
"""The modules that ``all-linear`` stands for on Megatron; each kind of adapters has some."""
_BUILDER = "megatron.bridge.models.model_provider:get_model"
_MIXED = "mixed_precision"
_SETS = dict(zip(MIXED, (COMPUTES, REDUCES), strict=True))


def has_reference(trainer: Any) -> bool:
    """Whether SkyRL builds a reference model."""
    keys = ("use_kl_loss", "use_kl_in_reward")
    return any(getattr(trainer.algorithm, key, False) for key in keys)


def in_fp16(strategy: str, role: str = "policy") -> str:
    """The keys to write so that a model computes in fp16."""
    if strategy == "megatron":
        return f"trainer.bf16=false and trainer.{role}.megatron_config.{LAYERS}.fp16=true"
    return f"trainer.{role}.fsdp_config.{_MIXED}.param_dtype=fp16"


def mixed_dtypes(config: Any, section: str = "fsdp_config") -> dict[str, torch.dtype]:
    """Map the keys of ``mixed_precision`` to the dtypes that SkyRL passes to FSDP.

    ``section`` is the key of ``fsdp_config``, for error messages.

    Raises:
        DtypeError: a dtype name is unknown to SkyRL; SkyRL's error would not name the key.
    """
    mixed = getattr(config, _MIXED, None)
    if mixed is None:
        return dict(MIXED)
    where = versioned("skyrl")
    return {
        key: own_dtype(getattr(mixed, key), f"{section}.{_MIXED}.{key}", where) for key in MIXED
    }


def find_unscaled(config: Any, section: str = "fsdp_config") -> str:
    """Return a warning if FSDP reduces gradients in fp16 although nothing scales the loss."""
    computes, reduces = mixed_dtypes(config, section).values()
    key = f"{section}.{_MIXED}"
    written = [f"{key}.reduce_dtype"] if reduces is torch.float16 else []
    return unscaled(versioned("skyrl"), written, computes, f"{key}.param_dtype")


def _of_mixed(config: Any, section: str) -> Iterator[Written]:
    """Yield the dtype keys of ``fsdp_config``, whose key is ``section``; SkyRL reads no others."""
    mixed = getattr(config, _MIXED, None)
    for key, value in vars(mixed).items() if mixed is not None else ():
        if key in _SETS or parse_dtype(str(value)) is not torch.float32:
            yield Written(f"{section}.{_MIXED}.{key}", value, _SETS.get(key, ""))


def of_fsdp(trainer: Any, role: str) -> Iterator[Written]:
    """Yield the dtype keys of a model on FSDP, and its keys for Megatron, without the defaults."""
    config, section = getattr(trainer, role).fsdp_config, f"trainer.{role}.fsdp_config"
    yield from _of_mixed(config, section)
    # On FSDP the flag sets only the dtype in which the reference model is stored.
    unread = trainer.strategy != "megatron" and not has_reference(trainer)
    if unread and not trainer.bf16 and mixed_dtypes(config, section) == MIXED:
        yield Written("trainer.bf16", trainer.bf16, COMPUTES, means="fp32")
    for place, name, value in _of_megatron(trainer, role):
        if parse_dtype(str(value)) is not torch.float32:
            key = f"trainer.{role}.megatron_config.{place}.{name}"
            yield Written(key, value, needs="trainer.strategy=megatron")


def read_requested(
    trainer: Any, role: str, ddp_config: Any, *, heads: int | None, adapters: bool = False
) -> RequestedConfig:
    """Read what is requested of a model's optimizer on Megatron.

    ``heads`` is the number of heads for multi-token prediction; ``adapters``: whether the model's
    worker has a store of LoRA adapters.
    """
    config = getattr(trainer, role)
    blockers = []
    if adapters:
        blockers.append("SkyRL's store of LoRA adapters copies the optimizer's own fp32 masters")
    if heads and look(_MTP).found:
        blockers.append("SkyRL clips a head for multi-token prediction by those masters")
    requested = _requested(
        getattr(config, "optimizer_config", None), config.megatron_config.optimizer_config_kwargs
    )
    return replace(
        requested,
        subject=role,
        declared=torch.bfloat16 if trainer.bf16 else torch.float32,
        # Keep use_precision_aware_optimizer=True if the user wrote it; SkyRL may raise an error.
        blockers=() if requested.asked.get(PRECISION_AWARE) else tuple(blockers),
        bucket_in_fp32=written_bucket(ddp_config),
        wrote=tuple(not_read_by_megatron(trainer, role)),
        # Only a mapping, not SkyRL's dataclass, can have the key ``check_for_nan_in_grad``.
        nan_check_written=isinstance(ddp_config, Mapping) and "check_for_nan_in_grad" in ddp_config,
    )


def of_caller(optim_config: Any, kwargs: Any) -> RequestedConfig:
    """Read settings for a caller that is no SkyRL worker; ``fp16`` in ``kwargs`` overrides bf16."""
    requested = _requested(optim_config, kwargs)
    flagged = torch.bfloat16 if requested.asked.get("bf16", True) else torch.float32
    return replace(requested, declared=torch.float16 if requested.asked.get("fp16") else flagged)


def read_lora(trainer: Any, role: str) -> dict[str, Any]:
    """The arguments of a model's LoRA adapters that SkyRL gives peft, or Megatron-Bridge; or empty.

    Only policy and critic have adapters; the critic is on FSDP.
    """
    section = getattr(trainer, role)
    lora: Any = getattr(section.model, "lora", None)
    if role == "ref" or lora is None or not lora.rank:
        return {}
    targets = lora.target_modules
    if trainer.strategy != "megatron" or role == "critic":
        modules = {"target_modules": targets, "exclude_modules": lora.exclude_modules}
        return {"r": lora.rank, "task_type": "CAUSAL_LM", **modules}
    bridged = section.megatron_config.lora_config
    if targets == "all-linear":
        gated = "gdn_in_proj_lora_is_safe" in look(f"{_WORKER}.configure_lora").names  # since 0.4
        targets = (*_LINEAR, *(("in_proj", "out_proj") if gated else ()))
    return {**vars(bridged), **vars(lora), "type": bridged.lora_type, "target_modules": targets}


def _requested(optim_config: Any, kwargs: Any) -> RequestedConfig:
    """The OptimizerConfig fields of the user, and Adam's beta2."""
    asked = {} if kwargs is None else {str(key): kwargs[key] for key in kwargs}
    if type(asked.get(PRECISION_AWARE)) is int:  # SkyRL's default, not the user's value
        del asked[PRECISION_AWARE]
    betas = getattr(optim_config, "adam_betas", None)
    if betas is not None and "adam_beta2" in look(OPTIMIZER).names:  # since SkyRL 0.3
        asked.setdefault("adam_beta2", float(betas[1]))
    return RequestedConfig(
        where=f"{versioned('skyrl')}, {KWARGS}",
        asked=asked,
        optimizer=str(getattr(optim_config, "optimizer", "adam")),
    )


def written_bucket(ddp_config: Any) -> bool | None:
    """``grad_reduce_in_fp32`` if the user wrote it, else ``None``."""
    mapping = isinstance(ddp_config, Mapping)
    value = ddp_config.get(BUCKET) if mapping else getattr(ddp_config, BUCKET, None)
    return None if value is None or type(value) is int else bool(value)


def not_read_by_megatron(trainer: Any, role: str) -> Iterator[Written]:
    """Yield the dtype keys of a model on Megatron that have no effect, or not on every version.

    These are the keys of ``fsdp_config`` that differ from the defaults, in the model's kwargs its
    own dtype and fields of the optimizer, and a reference model's keys for optimizer and bucket.
    """
    model, section = f"trainer.{role}.megatron_config", f"trainer.{role}.fsdp_config"
    meant: dict[torch.dtype | None, str] = {
        torch.float16: in_fp16("megatron", role),
        torch.float32: "trainer.bf16=false",
        torch.bfloat16: "trainer.bf16=true",
    }
    for one in _of_mixed(getattr(trainer, role).fsdp_config, section):
        key, dtype = one.key.rpartition(".")[2], parse_dtype(str(one.value))
        if dtype is not MIXED.get(key):
            needs = meant.get(dtype, "") if key == "param_dtype" else ""
            sets = "params" if key == "param_dtype" else ""
            yield replace(one, sets=sets, needs=needs)
    for place, name, value in _of_megatron(trainer, role):
        key, dtype = f"{model}.{place}.{name}", parse_dtype(str(value))
        if place != LAYERS:
            if role == "ref":  # which has neither an optimizer nor gradients
                yield Written(key, value)
        elif name == "fp16":  # from SkyRL 0.4 on, trainer.bf16 wins over it
            yield Written(key, value, "params", "trainer.bf16=false", means="fp16")
        elif name == "params_dtype":  # likewise; before 0.4, true wins over it
            yield Written(key, value, "params", meant.get(dtype, ""))
        elif name in SETS and dtype is not torch.float32:
            needs = f"{model}.{KWARGS}.{name}={value}"
            yield Written(key, value, needs="" if role == "ref" else needs)


def _of_megatron(trainer: Any, role: str) -> Iterator[tuple[str, str, object]]:
    """Yield section, name and value of the dtype keys in ``megatron_config``."""
    config = getattr(getattr(trainer, role), "megatron_config", None)
    for place in (LAYERS, KWARGS):
        for name, value in (getattr(config, place, None) or {}).items():
            if names_precision(name, value) and not name.startswith("use_"):
                yield place, name, value
    if written_bucket(getattr(config, "ddp_config", None)) is False:
        yield "ddp_config", BUCKET, False


def layers_of(trainer: Any, role: str) -> Mapping[str, Any]:
    """The fields of Megatron's TransformerConfig that the user wrote for a model."""
    return getattr(trainer, role).megatron_config.transformer_config_kwargs or {}


def predict_provider(
    trainer: Any, role: str, in_force: IsInForce, directory: str = ""
) -> SimpleNamespace:
    """Predict ``bf16``, ``fp16`` and ``params_dtype`` of the model provider in a worker.

    ``checkpoint`` is the checkpoint's dtype; empty if the checkpoint is not on this machine.
    """
    path = directory or str(getattr(trainer, role).model.path or trainer.policy.model.path)
    written, checkpoint = layers_of(trainer, role), model_files.checkpoint_dtype(path)
    provider = SimpleNamespace(
        checkpoint=checkpoint,
        bf16=checkpoint == "bf16",
        fp16=checkpoint == "fp16",
        params_dtype=DTYPES.get(checkpoint, torch.float32),
    )
    if in_force(DISPATCH, GROUP):
        obey(provider, bool(trainer.bf16))
    vars(provider).update({key: written[key] for key in ("fp16", "bf16") if key in written})
    asked = parse_dtype(str(written.get("params_dtype")))
    provider.params_dtype = asked or provider.params_dtype
    return provider


def obey(provider: Any, bf16: bool) -> bool:
    """Set a provider's dtype from ``trainer.bf16``; return whether it changes."""
    if not (provider.fp16 if bf16 else provider.bf16):
        return False
    provider.params_dtype = torch.bfloat16 if bf16 else torch.float32
    provider.bf16, provider.fp16 = bf16, False
    return True


def dtype_of(provider: Any, bf16: bool) -> torch.dtype:
    """The dtype of the model that Megatron will build from a provider.

    Megatron-Bridge 0.6 reads ``trainer.bf16`` again; before 0.6 it sets ``bf16`` if that is true.
    """
    if "pipeline_dtype" in look(_BUILDER).names and (bf16 or not provider.fp16):
        return torch.bfloat16 if bf16 else torch.float32
    if provider.fp16:
        return torch.float16
    return torch.bfloat16 if provider.bf16 or bf16 else provider.params_dtype


def megatron_dtype(
    trainer: Any, role: str, in_force: IsInForce, directory: str = ""
) -> torch.dtype | None:
    """The dtype of a model on Megatron; ``None`` if it depends on another machine's checkpoint."""
    provider = predict_provider(trainer, role, in_force, directory)
    if not (provider.checkpoint or trainer.bf16 or layers_of(trainer, role).get("fp16")):
        return None
    return dtype_of(provider, bool(trainer.bf16))


def read_trained(
    trainer: Any, role: str, in_force: IsInForce, directory: str = ""
) -> Engine | None:
    """Read the dtype in which policy or reference model computes; see ``megatron_dtype``."""
    if trainer.strategy == "megatron":
        dtype = megatron_dtype(trainer, role, in_force, directory)
        if dtype is None:
            return None
        written = layers_of(trainer, role)
        quantized = read_format(written, f"trainer.{role}.megatron_config.{LAYERS}.{{}}")
        if role == "policy" and not written.get("fp16"):
            return Engine(role, name_of(dtype), "trainer.bf16", format=quantized)
        key = f"trainer.{role}.megatron_config.{LAYERS}.fp16"
        because = "" if "fp16" in written else f"trainer.bf16={trainer.bf16}"
        values = {"fp16": "true", "bf16" if trainer.bf16 else "fp32": "false"}
        value = written.get("fp16")
        engine = Engine(role, name_of(dtype), key, value, because, values=values)
        return replace(engine, format=quantized)
    config, section = getattr(trainer, role).fsdp_config, f"trainer.{role}.fsdp_config"
    asked = name_of(mixed_dtypes(config, section)["param_dtype"])
    computes = "fp16" if asked == "fp16" and in_force(FSDP_SCALING, FSDP) else "bf16"
    key = f"{section}.{_MIXED}.param_dtype"
    value = getattr(getattr(config, _MIXED, None), "param_dtype", None)
    autocast = f"SkyRL runs the model under an autocast to bf16, whatever {key} says"
    # No value of param_dtype gives fp32 matrix products, because SkyRL autocasts to bf16.
    values = {"bf16": "bfloat16", "fp16": "float16"}
    return Engine(role, computes, key, value, "" if computes == asked else autocast, values=values)


def named(value: Any, section: str = INFERENCE, key: str = MODEL_DTYPE) -> str:
    """The inference engines' name for the dtype that the user wrote at ``key`` in ``section``.

    Raises:
        DtypeError: the value names no dtype that an engine computes in.
    """
    if isinstance(value, str) and value in ENGINE_NAMES.values():
        return value  # return early, because a call of ``versioned`` takes milliseconds
    return engine_name(value, f"{section}.{key}", versioned("skyrl"))


def canonical(name: str) -> str:
    """The canonical name of an engine's dtype, or ``AUTO``."""
    dtype = parse_dtype(name)
    return AUTO if dtype is None else name_of(dtype)


def read_rollouts(engines: Any, path: str) -> list[Engine]:
    """Read the dtypes in which the inference engines compute; ``path`` is the model's."""
    backend = str(engines.backend)
    return [model_files.resolve_by_model(engine, backend, path) for engine in _engines(engines)]


def _engines(engines: Any) -> Iterator[Engine]:
    wanted = getattr(engines, "fp8_weight_sync_mode", None)
    if wanted is not None:
        key = f"{INFERENCE}.fp8_weight_sync_mode={wanted}"
        scalings = _WIRES.get(str(wanted), (formats.UNKNOWN, formats.UNKNOWN))
        yield Engine(
            "rollout", FP8, "", because=key, format=Format(formats.in_e4m3(*scalings), (), key)
        )
        return
    elsewhere, name = started_elsewhere(engines), named(engines.model_dtype)
    because = f"{KEY}, if the servers that run already were started so" if elsewhere else ""
    engine = Engine("rollout", canonical(name), KEY, name, because, follows=not elsewhere)
    over = {} if elsewhere else overriding(engines)
    yield from {_overridden(engine, *item) for item in over.items()} or {engine}


def _overridden(engine: Engine, section: str, values: Mapping[str, Any]) -> Engine:
    if "dtype" in values:
        name = named(values["dtype"], section, "dtype")
        engine = Engine("rollout", canonical(name), f"{section}.dtype", name)
    return with_rounded(engine, values, section)


def overriding(engines: Any) -> dict[str, Mapping[str, Any]]:
    """The config sections whose values override SkyRL's values for some or all engines."""
    sections = {name: getattr(engines, name, None) or {} for name in OVER}
    first, *roles = OVER
    by_role = getattr(engines, "enable_pd", False) and any(sections[role] for role in roles)
    return {f"{INFERENCE}.{name}": sections[name] for name in (roles if by_role else (first,))}


def started_elsewhere(engines: Any) -> bool:
    """Whether SkyRL uses inference servers that SkyRL itself did not start."""
    keys = ("external_proxy_url", "external_server_urls")
    return not engines.run_engines_locally or any(getattr(engines, key, None) for key in keys)


def asked_of(engines: Any) -> tuple[str, str]:
    """The name and config key of the engines' dtype; the name is empty if their dtypes differ."""
    asked = {(engine.computes, engine.key) for engine in _engines(engines)}
    if len(asked) > 1:
        return "", KEY
    ((computes, key),) = asked
    return ENGINE_NAMES.get(computes, computes), key
