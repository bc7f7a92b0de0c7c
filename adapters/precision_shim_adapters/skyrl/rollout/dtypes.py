"""Read from a SkyRL job's config in which dtypes policy, reference model and engines compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from precision_shim.adapting import Decision, Findings, versioned
from precision_shim.precision.agreement import AUTO, ENGINE_NAMES, FP8, Engine, Wire, judge_wires
from precision_shim.precision.dtypes import name_of, parse_dtype

from ...agreement import model_files
from ...agreement.lm_head import IsInForce
from ...agreement.names import with_rounded, write_key
from ...agreement.report import FEATURE, Sides
from ...megatron import DISPATCH, GROUP
from ...torch_fp16 import FEATURE as FSDP_SCALING
from ..config import INFERENCE, MODEL_DTYPE, named
from ..training import dtype_keys, fsdp, megatron

KEY = f"{INFERENCE}.{MODEL_DTYPE}"

OVER = ("engine_init_kwargs", "prefill_init_kwargs", "decode_init_kwargs")
"""Sections that override SkyRL's engine settings; before 0.4 only the first exists."""

_DELTA = "skyrl.backends.skyrl_train.weight_sync.delta.checkpoint:DeltaCheckpointPublisher"
PUBLISHER: dict[str, Any] = {
    "target": f"{_DELTA}.create_delta_files",
    "only_if": (_DELTA,),
    "delete_when": "SkyRL's delta sync sends model_dtype",
    "optional": True,
}
"""Arguments of the seams on the delta sync."""

READ = ("target_dtype", "_base_location", "_current_rank", "_ensure_base_locations")
"""Names of the delta sync's class on which ``base_dtypes`` relies."""

_KWARGS = "transformer_config_kwargs"
_MIXED = "mixed_precision"
_AUTOCAST = "SkyRL runs the model under an autocast to bf16"


def sides_of(config: Any, in_force: IsInForce, directory: str = "") -> Sides:
    """Read the dtypes of the models of a job that has a rollout, but no LM heads.

    ``trainer`` is ``None`` if the policy's dtype depends on a checkpoint on another machine.
    ``directory`` is the model's, if it is not the directory in the config.

    Raises:
        DtypeError: a key's value is no dtype name.
    """
    trainer, path = config.trainer, directory or str(config.trainer.policy.model.path)
    others = _rollouts(config.generator.inference_engine, path)
    built = dtype_keys.has_reference(trainer)
    ref = _read_trained(trainer, "ref", in_force, directory) if built else None
    if ref is not None:
        others.insert(0, ref)
    policy = _read_trained(trainer, "policy", in_force, directory)
    decided = []
    if policy is None:
        because = (
            f"trainer.bf16={trainer.bf16}, and the dtype of the checkpoint decides, which is not "
            f"on this machine: {trainer.policy.model.path}"
        )
        decided.append(_decided("rollout", "not compared with the policy", because))
    elif policy.because:
        decided.append(_decided("policy", policy.computes, policy.because))
    return Sides("skyrl", versioned("skyrl"), policy, others, decided=tuple(decided))


def _decided(subject: str, chosen: str, because: str) -> Decision:
    return Decision("skyrl", subject, FEATURE, chosen, because)


def _read_trained(trainer: Any, role: str, in_force: IsInForce, directory: str) -> Engine | None:
    if trainer.strategy == "megatron":
        return _on_megatron(trainer, role, in_force, directory)
    return _on_fsdp(trainer, role, in_force)


def _on_megatron(trainer: Any, role: str, in_force: IsInForce, directory: str) -> Engine | None:
    dtype = megatron_dtype(trainer, role, in_force, directory)
    if dtype is None:
        return None
    written = getattr(trainer, role).megatron_config.transformer_config_kwargs or {}
    if role == "policy" and not written.get("fp16"):
        return Engine(role, name_of(dtype), "trainer.bf16")
    key = f"trainer.{role}.megatron_config.{_KWARGS}.fp16"
    because = "" if "fp16" in written else f"trainer.bf16={trainer.bf16}"
    values = {"fp16": "true", "bf16" if trainer.bf16 else "fp32": "false"}
    return Engine(role, name_of(dtype), key, written.get("fp16"), because, values=values)


def megatron_dtype(
    trainer: Any, role: str, in_force: IsInForce, directory: str = ""
) -> torch.dtype | None:
    """The dtype of a model on Megatron; ``None`` if it depends on another machine's checkpoint.

    ``role`` is a section of ``trainer``, such as ``"ref"``. For ``directory`` see ``sides_of``.
    """
    path = directory or str(getattr(trainer, role).model.path or trainer.policy.model.path)
    written = getattr(trainer, role).megatron_config.transformer_config_kwargs or {}
    checkpoint, bf16 = model_files.checkpoint_dtype(path), bool(trainer.bf16)
    if not checkpoint and not bf16 and not written.get("fp16"):
        return None
    obeyed = in_force(DISPATCH, GROUP)
    provider = megatron.predicted_provider(trainer, role, checkpoint, obeyed=obeyed)
    return megatron.dtype_of(provider, bf16)


def _on_fsdp(trainer: Any, role: str, in_force: IsInForce) -> Engine:
    config = getattr(trainer, role).fsdp_config
    section = f"trainer.{role}.fsdp_config"
    asked = name_of(dtype_keys.mixed_dtypes(config, section)["param_dtype"])
    in_fp16 = asked == "fp16" and in_force(FSDP_SCALING, fsdp.GROUP)
    key = f"{section}.{_MIXED}.param_dtype"
    written = getattr(getattr(config, _MIXED, None), "param_dtype", None)
    because = "" if in_fp16 or asked == "bf16" else f"{_AUTOCAST}, whatever {key} says"
    # No value of param_dtype gives fp32 matrix products, because SkyRL autocasts to bf16.
    values = {"bf16": "bfloat16", "fp16": "float16"}
    return Engine(role, asked if in_fp16 else "bf16", key, written, because, values=values)


def _rollouts(engines: Any, path: str) -> list[Engine]:
    backend = str(engines.backend)
    return [model_files.resolve_by_model(engine, backend, path) for engine in _read_asked(engines)]


def _computes(config: Any) -> set[str]:
    path = str(config.trainer.policy.model.path)
    return {engine.computes for engine in _rollouts(config.generator.inference_engine, path)}


def _read_asked(engines: Any) -> Iterator[Engine]:
    wanted = getattr(engines, "fp8_weight_sync_mode", None)
    if wanted is not None:
        yield Engine("rollout", FP8, "", because=f"{INFERENCE}.fp8_weight_sync_mode={wanted}")
        return
    elsewhere, name = started_elsewhere(engines), named(engines.model_dtype)
    because = f"{KEY}, if the servers that run already were started so" if elsewhere else ""
    own = Engine("rollout", _canonical(name), KEY, name, because, follows=not elsewhere)
    over = {} if elsewhere else overriding(engines)
    yield from {_over_own(own, section, values) for section, values in over.items()} or {own}


def _over_own(own: Engine, section: str, values: Mapping[str, Any]) -> Engine:
    if "dtype" in values:
        name = named(values["dtype"], section, "dtype")
        own = Engine("rollout", _canonical(name), f"{section}.dtype", name)
    return with_rounded(own, values, section)


def overriding(engines: Any) -> dict[str, Mapping[str, Any]]:
    """The config sections whose values override SkyRL's own values for some or all engines."""
    sections = {name: getattr(engines, name, None) or {} for name in OVER}
    first, *roles = OVER
    by_role = getattr(engines, "enable_pd", False) and any(sections[role] for role in roles)
    return {f"{INFERENCE}.{name}": sections[name] for name in (roles if by_role else (first,))}


def started_elsewhere(engines: Any) -> bool:
    """Whether SkyRL uses inference servers that SkyRL itself did not start."""
    keys = ("external_proxy_url", "external_server_urls")
    return not engines.run_engines_locally or any(getattr(engines, key, None) for key in keys)


def _canonical(name: str) -> str:
    dtype = parse_dtype(name)
    return AUTO if dtype is None else name_of(dtype)


def hand_on_names(config: Any) -> None:
    """Replace the user's dtype names by the engines' names for the same dtypes.

    Raises:
        DtypeError: a key's value is no dtype in which an engine computes.
    """
    engines = config.generator.inference_engine
    engines.model_dtype = named(engines.model_dtype)
    for section, values in overriding(engines).items():
        if "dtype" in values:
            name = named(values["dtype"], section, "dtype")
            setattr(engines, section.rpartition(".")[2], {**values, "dtype": name})


def judge_syncs(config: Any, *, may_write: bool) -> Findings:
    """Find the weight syncs that round; if ``may_write``, first change what SkyRL sends."""
    sent = _send_in_engines_dtype(config) if may_write else Findings()
    return sent + judge_wires("skyrl", versioned("skyrl"), _wires(config))


def _send_in_engines_dtype(config: Any) -> Findings:
    """Make SkyRL send the weights in the engines' dtype; return the decision.

    If a section such as ``engine_init_kwargs`` sets another dtype for all engines, unpatched SkyRL,
    which casts to ``model_dtype``, would round the weights twice.
    """
    engines = config.generator.inference_engine
    computes, before = _computes(config), engines.model_dtype
    if len(computes) != 1 or computes & {AUTO, FP8, _canonical(named(before))}:
        return Findings()
    (dtype,) = computes
    engines.model_dtype = ENGINE_NAMES[dtype]
    because = f"{KEY}: {before} -> {engines.model_dtype}"
    return Findings((_decided("rollout", f"weights go out in {dtype}", because),))


def write(config: Any, key: str, value: str) -> None:
    """Write a value to an engine's config key."""
    if _KWARGS in key:
        megatron = config.trainer.ref.megatron_config
        kwargs = {**(megatron.transformer_config_kwargs or {}), "fp16": value == "true"}
        kwargs.pop("bf16", None)  # trainer.bf16 decides
        megatron.transformer_config_kwargs = kwargs
        return
    if _MIXED in key and config.trainer.ref.fsdp_config.mixed_precision is None:
        from skyrl.train.config.config import MixedPrecisionConfig

        config.trainer.ref.fsdp_config.mixed_precision = MixedPrecisionConfig()
    write_key(config, key, value)


def _wires(config: Any) -> list[Wire]:
    """Describe the dtypes of a job's weight syncs, from the config that the shim has changed."""
    engines = config.generator.inference_engine
    sent, because = _canonical(named(engines.model_dtype)), f"SkyRL casts to {KEY}"
    computes = _computes(config) - {AUTO, FP8}
    wires = [
        Wire("rollout", dtype, sent, because, KEY, f"Write {KEY}={ENGINE_NAMES[dtype]}.")
        for dtype in sorted(computes - {sent})
    ]
    if engines.weight_sync_backend == "delta":
        path = str(config.trainer.policy.model.path)
        wires += delta_wires(computes, model_files.stored_dtypes(path))
    return wires


def asked_of(engines: Any) -> tuple[str, str]:
    """The name and config key of the engines' dtype; the name is empty if their dtypes differ."""
    asked = {(engine.computes, engine.key) for engine in _read_asked(engines)}
    if len(asked) > 1:
        return "", KEY
    ((computes, key),) = asked
    return ENGINE_NAMES.get(computes, computes), key


def base_dtypes(publisher: Any) -> frozenset[str]:
    """Canonical names of the dtypes in a delta sync's base checkpoint; empty but on rank 0."""
    if publisher._current_rank() != 0:
        return frozenset()
    names = {location.dtype for location in publisher._ensure_base_locations().values()}
    return frozenset(model_files.OF_HEADER[name] for name in names if name in model_files.OF_HEADER)


def delta_wires(computes: set[str], stored: frozenset[str]) -> list[Wire]:
    """Make a ``Wire`` for each pair of a base checkpoint's dtype and an engine's dtype.

    The receiver of a delta sync changes bytes in a copy of the base checkpoint, so SkyRL sends the
    weights in the dtypes of the checkpoint's files (``stored``), whatever ``model_dtype`` is.
    """
    return [
        Wire(
            "rollout",
            compute,
            dtype,
            f"the delta sync sends the dtype of the base checkpoint, {dtype}",
            f"{INFERENCE}.weight_sync_backend",
            f"Write {INFERENCE}.weight_sync_backend=nccl, or save the model of "
            f"trainer.policy.model.path in {compute} or fp32 and name that directory there.",
        )
        for compute in sorted(computes)
        for dtype in sorted(stored)
    ]
