"""SkyRL: the dtypes in which policy, reference model and engines compute, and weights are sent."""

from __future__ import annotations

from typing import Any

from precision_shim.adapting import Decision, Findings, versioned
from precision_shim.adapting.rollouts import AUTO, ENGINE_NAMES, FP8, Wire, judge_wires

from ...agreement import model_files
from ...agreement.lm_head import IsInForce
from ...agreement.names import write_key
from ...agreement.report import FEATURE, Sides
from .. import config as reader

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


def sides_of(config: Any, in_force: IsInForce, directory: str = "") -> Sides:
    """Read the dtypes of the models of a job that has a rollout, but no LM heads.

    ``trainer`` is ``None`` if the policy's dtype depends on a checkpoint on another machine.
    ``directory`` is the model's, if it is not the directory in the config.

    Raises:
        DtypeError: a key's value is no dtype name.
    """
    trainer, path = config.trainer, directory or str(config.trainer.policy.model.path)
    others = reader.read_rollouts(config.generator.inference_engine, path)
    built = reader.has_reference(trainer)
    ref = reader.read_trained(trainer, "ref", in_force, directory) if built else None
    if ref is not None:
        others.insert(0, ref)
    policy = reader.read_trained(trainer, "policy", in_force, directory)
    decided = []
    if policy is None:
        because = (
            f"trainer.bf16={trainer.bf16}, and the dtype of the checkpoint decides, which is not "
            f"on this machine: {trainer.policy.model.path}"
        )
        decided.append(_decided("rollout", "not compared with the policy", because))
    elif policy.because:
        decided.append(_decided("policy", policy.computes, policy.because))
    layers = getattr(trainer.policy.megatron_config, reader.LAYERS) or {}
    place = f"trainer.policy.megatron_config.{reader.LAYERS}.{{}}"
    on_megatron = policy if trainer.strategy == "megatron" else None
    backend = str(config.generator.inference_engine.backend)
    gates = model_files.gates_of(on_megatron, others, backend, path, layers, place=place)
    where = versioned("skyrl")
    return Sides("skyrl", where, policy, others, decided=tuple(decided), gates=gates)


def _decided(subject: str, chosen: str, because: str) -> Decision:
    return Decision("skyrl", subject, FEATURE, chosen, because)


def _computes(config: Any) -> set[str]:
    path = str(config.trainer.policy.model.path)
    return {
        engine.computes for engine in reader.read_rollouts(config.generator.inference_engine, path)
    }


def hand_on_names(config: Any) -> None:
    """Replace the user's dtype names by the engines' names for the same dtypes.

    Raises:
        DtypeError: a key's value is no dtype in which an engine computes.
    """
    engines = config.generator.inference_engine
    engines.model_dtype = reader.named(engines.model_dtype)
    for section, values in reader.overriding(engines).items():
        if "dtype" in values:
            name = reader.named(values["dtype"], section, "dtype")
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
    computes, before = _computes(config), reader.named(engines.model_dtype)
    if len(computes) != 1 or computes & {AUTO, FP8, reader.canonical(before)}:
        return Findings()
    (dtype,) = computes
    engines.model_dtype = ENGINE_NAMES[dtype]
    because = f"{reader.KEY}: {before} -> {engines.model_dtype}"
    return Findings((_decided("rollout", f"weights go out in {dtype}", because),))


def write(config: Any, key: str, value: str) -> None:
    """Write a value to an engine's config key."""
    if reader.LAYERS in key:
        megatron = config.trainer.ref.megatron_config
        kwargs = {**(megatron.transformer_config_kwargs or {}), "fp16": value == "true"}
        kwargs.pop("bf16", None)  # trainer.bf16 decides
        megatron.transformer_config_kwargs = kwargs
        return
    if ".mixed_precision." in key and config.trainer.ref.fsdp_config.mixed_precision is None:
        from skyrl.train.config.config import MixedPrecisionConfig

        config.trainer.ref.fsdp_config.mixed_precision = MixedPrecisionConfig()
    write_key(config, key, value)


def _wires(config: Any) -> list[Wire]:
    """Describe the dtypes of a job's weight syncs, from the config that the shim has changed."""
    engines = config.generator.inference_engine
    sent, because = (
        reader.canonical(reader.named(engines.model_dtype)),
        f"SkyRL casts to {reader.KEY}",
    )
    computes = _computes(config) - {AUTO, FP8}
    wires = [
        Wire(
            "rollout",
            dtype,
            sent,
            because,
            reader.KEY,
            f"Write {reader.KEY}={ENGINE_NAMES[dtype]}.",
        )
        for dtype in sorted(computes - {sent})
    ]
    if engines.weight_sync_backend == "delta":
        path = str(config.trainer.policy.model.path)
        wires += delta_wires(computes, model_files.stored_dtypes(path))
    return wires


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
            f"{reader.INFERENCE}.weight_sync_backend",
            f"Write {reader.INFERENCE}.weight_sync_backend=nccl, or save the model of "
            f"trainer.policy.model.path in {compute} or fp32 and name that directory there.",
        )
        for compute in sorted(computes)
        for dtype in sorted(stored)
    ]
