"""Predict how a job would resume a Megatron checkpoint, with and without the shim's load seams.

With the shim in force, the rules are those of the seams in ``megatron.checkpoints``. Without the
shim, the prediction follows Megatron's treatment of the stored dtypes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from precision_shim.adapting import version_of
from precision_shim.precision.continuing import how_read, master_is_lost, moment_becomes
from precision_shim.precision.dtypes import name_of, parse_dtype
from precision_shim.precision.model import TrainableDtypes
from precision_shim_adapters.common.megatron_keys import KEEPING, KEYED, OFFLOADED
from precision_shim_adapters.megatron.checkpoints import cpu_offload
from precision_shim_adapters.megatron.installed import fused_adam_support
from precision_shim_adapters.megatron.policy import groups
from precision_shim_adapters.megatron.policy.legality import REMAINDERS_SINCE, release
from precision_shim_adapters.megatron.policy.optimizer_plan import plan_optimizer
from precision_shim_adapters.megatron.policy.requested import (
    DISPATCH,
    KEYS,
    PRECISION_AWARE,
    STATES,
    RequestedConfig,
    what_is_in_force,
)

from .layout import MOMENTS, NUMBERS, REMAINDERS, UNKNOWN, CheckpointPart, Outcome, halves
from .prediction import Here

COMMON_WITHIN = (0, 19)
"""The first megatron-core release that reads the common state from an object in ``.distcp``."""

_TAKES_PADDING = (0, 17)
"""The first megatron-core release whose ``_set_main_param_and_optimizer_states`` skips entries
other than tensors."""

_OFFLOAD, _SHARE = "optimizer_cpu_offload", "optimizer_offload_fraction"

_BUCKET = "grad_reduce_in_fp32"
"""The field of Megatron's DDP config with which a job may set the bucket's dtype."""


@dataclass(frozen=True)
class Live:
    """The optimizer that a resumed job would have.

    Attributes:
        precision_aware: whether FusedAdam keeps master weights and moments.
        remainders: whether FusedAdam keeps remainders instead of whole master weights.
        states: the dtypes of the moments and of a 16-bit parameter's master.
        params: the parameters' dtype.
        problem: why the optimizer cannot be built; empty if it can.
        on_host: the fraction of states on the CPU, if the optimizer is for CPU offload.
        asked_aware: as ``precision_aware``, even if CPU offload makes the setting ineffective.
        torchs_adam: whether Megatron steps with torch's Adam, because there is no FusedAdam.
    """

    precision_aware: bool
    remainders: bool
    states: Mapping[str, str]
    params: str
    problem: str
    on_host: float | None
    asked_aware: bool
    torchs_adam: bool


def assume_fields(part: CheckpointPart, here: Here) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of Megatron's OptimizerConfig, and the field of its DDP config, if it is set.

    They are those of the job's config; without a config, those that the checkpoint implies.
    """
    fields = dict(here.config or {})
    if here.config is None and part.masters in (REMAINDERS, NUMBERS):
        fields[PRECISION_AWARE] = True
    # Megatron loads states into an optimizer for CPU offload only if the config is precision-aware.
    if here.config is None and OFFLOADED in part.facts:
        share = part.facts[OFFLOADED]
        fields |= {_OFFLOAD: True, _SHARE: share, PRECISION_AWARE: True}
    if "adam_beta2" in part.facts:
        fields.setdefault("adam_beta2", part.facts["adam_beta2"])
    fields |= here.instead
    return fields, {_BUCKET: fields.pop(_BUCKET)} if _BUCKET in fields else {}


def assume_requested(part: CheckpointPart, here: Here, where: str, subject: str) -> RequestedConfig:
    """Derive the ``RequestedConfig`` of a resuming job whose config has Megatron's field names.

    ``where`` is framework and config key, for messages.
    """
    fields, ddp = assume_fields(part, here)
    bucket = ddp.get(_BUCKET)
    return RequestedConfig(
        where=where,
        subject=subject,
        asked=fields,
        declared=find_params_dtype(part),
        bucket_in_fp32=None if bucket is None else bool(bucket),
    )


def find_params_dtype(part: CheckpointPart) -> torch.dtype:
    """The parameters' dtype, or bf16 if the checkpoint does not show the dtype.

    A model with some parameters in fp32 has the dtype of the others.
    """
    floating = {dtype for dtype in part.dtypes("params") if dtype[:2] in ("fp", "bf")}
    if len(floating) > 1:
        floating.discard("fp32")
    stored = part.facts.get("params") or (floating.pop() if len(floating) == 1 else "")
    return parse_dtype(stored) or torch.bfloat16


def predict_resume(
    framework: str,
    part: CheckpointPart,
    here: Here,
    requested: RequestedConfig,
    *,
    mends_offload: bool = False,
) -> Outcome:
    """Predict how a job would resume a checkpoint.

    ``mends_offload`` is whether the framework itself, such as SkyRL, patches Megatron's load of an
    optimizer for CPU offload.
    """
    core = version_of("megatron-core", ("megatron",)) or ""
    half = halves(part) or _lacks_common(part, core)
    if half is not None:
        return half
    if part.masters == UNKNOWN:
        because = "the values of its masters cannot be read, and nothing else tells"
        return Outcome("not here", because)
    holds = partial(here.in_force, framework)
    live = _live(requested, part, here, holds)
    if live.problem:
        return Outcome("fails", f"the optimizer cannot be built: {live.problem}")
    if not holds(DISPATCH, KEYS):  # Megatron compares the keys before it reads a state
        stored, bucket = part.facts.get("bucket"), requested.bucket_in_fp32
        wanted = None if bucket is None else "fp32" if bucket else live.params
        if part.facts.get("sharding") in KEYED and wanted not in (None, stored):
            return Outcome(
                "fails", f"its keys name a {stored} gradient bucket, and the job has a {wanted} one"
            )
    counting = any(holds(feature, cpu_offload.GROUP) for feature in cpu_offload.FEATURES)
    shimmed = holds(DISPATCH, STATES)
    judged = _judge_groups(part, here, release(core), shimmed)
    if live.torchs_adam and part.facts.get("sharding"):
        judged = Outcome(
            "refused" if shimmed else "fails",
            "Megatron would step with torch's Adam, and cannot load its states: TransformerEngine "
            "is not installed",
        )
    if isinstance(judged, Outcome):
        return judged
    return (
        _cannot_count(part, live, counting, mends_offload)
        or (None if counting else _judge_left_out(part, live, mends_offload))
        or (_masters_with_shim(part, live) if shimmed else _masters_without(part, live))
        or _narrower(part, live, shimmed)
        or _scaler(part, live)
        or _go_on(part, live, judged)
    )


def predict_by_flags(part: CheckpointPart, here: Here) -> Outcome:
    """Predict how a trainer with Megatron's flags would resume a checkpoint."""
    framework = part.framework
    requested = assume_requested(part, here, f"{framework}, flags", part.subject or "actor")
    return predict_resume(framework, part, here, requested)


def _live(requested: RequestedConfig, part: CheckpointPart, here: Here, holds: Any) -> Live:
    dtype = find_params_dtype(part)
    now = what_is_in_force(here.settings, holds, fused_adam_support())
    fields = plan_optimizer(requested, TrainableDtypes({dtype: 1}), now).fields
    asked_aware, offloads = bool(fields.get(PRECISION_AWARE)), fields.get(_OFFLOAD)
    aware = asked_aware and not offloads
    params = name_of(dtype)

    def named(key: str) -> str:
        value = fields.get(key)
        value = parse_dtype(value) if isinstance(value, str) else value
        return name_of(value) if aware and isinstance(value, torch.dtype) else "fp32"

    remainders = (
        aware
        and params == "bf16"
        and (now.support.version or ()) >= REMAINDERS_SINCE
        and fields.get("store_param_remainders", True)
        and named("main_params_dtype") == "fp32"
    )
    return Live(
        aware,
        bool(remainders),
        states={
            **{name: named(f"{name}_dtype") for name in MOMENTS},
            "master": "fp32" if params == "fp32" else named("main_params_dtype"),
        },
        params=params,
        problem=now.support.problem if aware else "",
        on_host=float(fields.get(_SHARE) or 0.0) if offloads else None,
        asked_aware=asked_aware,
        torchs_adam=not offloads and now.support.version is None and find_spec("apex") is None,
    )


def _lacks_common(part: CheckpointPart, core: str) -> Outcome | None:
    files = {archive.path.name for unit in part.units for archive in unit.common}
    if not core or release(core) >= COMMON_WITHIN or "common.pt" in files:
        return None
    lacking = f"megatron-core {core} looks for common.pt, which newer releases do not write"
    return Outcome("fails", lacking, "megatron-core 0.19 or newer")


def _cannot_count(
    part: CheckpointPart, live: Live, shimmed: bool, repaired: bool
) -> Outcome | None:
    """The outcome if CPU offload makes the load fail or lose the step count; else ``None``."""
    written = OFFLOADED in part.facts
    uncounted = written and not part.facts["counted"]
    plain = live.on_host is not None and not live.asked_aware
    fails = "Megatron loads nothing into an optimizer for CPU offload that is not precision-aware"
    lacking = "it has no step count, and the optimizer would count from 1 again"
    if part.facts.get("names_classes") and not repaired:
        return Outcome("fails", "its common state names classes, and torch does not load these")
    if plain and not repaired:
        return Outcome("fails", fails)
    if uncounted and shimmed:
        return Outcome("refused", lacking)
    whole = live.on_host == 1.0 or (uncounted and live.on_host == 0.0)
    if plain and not (whole and part.facts.get("stepped")):
        return Outcome("fails", f"{fails} and partly on the GPU, or from such a form")
    return Outcome("misread", lacking) if uncounted else None


def _judge_left_out(part: CheckpointPart, live: Live, repaired: bool) -> Outcome | None:
    """The outcome if the inner optimizers would not receive all states; otherwise ``None``."""
    sharding = part.facts.get("sharding")
    if live.on_host is None:
        return None
    if sharding == "dp_reshardable" and not repaired:
        return Outcome("misread", "the optimizer on the host would count its steps from 1 again")
    if sharding == "dp_zero_gather_scatter":
        because = "the stepped masters would be those of a step on random gradients"
        return Outcome("misread", because)
    if live.on_host < 1.0:
        return Outcome("misread", "FusedAdam would take each step as the one after the checkpoint")
    return None


def _masters_with_shim(part: CheckpointPart, live: Live) -> Outcome | None:
    for name in ("master", *MOMENTS):
        for stored in part.dtypes(name):
            if how_read(stored, "fp32", master=name == "master") == "cast":
                return Outcome("refused", f"its {name} is {stored}, and would be cast to fp32")
    numbers = partial(bool, part.masters == NUMBERS)
    aware, params = live.precision_aware, live.params
    if any(
        master_is_lost(stored, numbers, precision_aware=aware, params=params)
        for stored in part.dtypes("master")
    ):
        return Outcome(
            "refused",
            "its masters are int16 remainders without their dtype: they cannot be turned back into "
            "weights for certain",
        )
    return None


def _cannot_load(part: CheckpointPart, live: Live, sharding: str) -> str:
    """Why Megatron, without the shim, cannot load this form; empty if it can."""
    if sharding in KEYED and not live.precision_aware and "fp32" in part.facts.get("owned", ()):
        return "Megatron loads with autograd on, and cannot write fp32 parameters"
    now = release(version_of("megatron-core", ("megatron",)) or "")
    if live.precision_aware and sharding == "dp_reshardable" and now < _TAKES_PADDING:
        # Before 0.17 Megatron passes a bool named 'padding' to FusedAdam.
        return "this Megatron cannot load a precision-aware optimizer in this form"
    return ""


def _masters_without(part: CheckpointPart, live: Live) -> Outcome | None:
    sharding, remainders = part.facts.get("sharding"), part.masters == REMAINDERS
    because = _cannot_load(part, live, str(sharding))
    if because:
        return Outcome("fails", because)
    if live.remainders and not remainders:
        if sharding in KEEPING:
            return Outcome(
                "misread", f"its masters, {part.masters}, would be cast to int16 remainders"
            )
        return Outcome("fails", "FusedAdam keeps int16 remainders, and takes no fp32 masters")
    if part.masters == NUMBERS:
        return Outcome("misread", "remainders that were stored as numbers would become the weights")
    if remainders and not live.remainders:
        return Outcome("misread", "its int16 remainders would be cast, and become the weights")
    return None


def _narrower(part: CheckpointPart, live: Live, shimmed: bool) -> Outcome | None:
    rounded, scaled = [], None
    for name, kept in live.states.items():
        becomes = moment_becomes(kept, partial(bool, part.bf16_moments.get(name)))
        if becomes == "rounded":
            rounded.append(name)
        elif becomes == "scaled":
            scaled = Outcome("misread", f"{name} in {kept} gets a scale that is computed anew")
    names = " and ".join(rounded)
    if rounded and shimmed:
        return Outcome("refused", f"its {names} hold fp32 values that would be rounded to bf16")
    if rounded:
        return Outcome("misread", f"its fp32 {names} would be rounded without a word")
    return scaled


_RATES = {"max_lr": ("lr", "decoupled_lr"), "min_lr": ("min_lr", "decoupled_min_lr")}
"""The fields of Megatron's OptimizerConfig from which a parameter group has its learning rates."""


def _judge_groups(
    part: CheckpointPart, here: Here, core: tuple[int, ...], shimmed: bool
) -> Outcome | str:
    """The outcome if groups are not found or get others' settings; else what "exact" rests on."""
    keys, config, given = groups.identifiers(core), here.config or {}, ""
    unlike: dict[str, Any] = {}
    for saved in part.groups:
        live = []
        for group in saved:
            overridden = not group.get("default_config", not group.get("is_decoupled_lr"))
            fields = {pair[overridden]: name for name, pair in _RATES.items()}
            live.append(group | {fields[key]: config[key] for key in fields.keys() & config.keys()})
            if not overridden:
                unlike |= {key: group.get(name) for key, name in fields.items()}
        unlike = {key: rate for key, rate in unlike.items() if config.get(key) != rate}
        differing = ", ".join(groups.merged(saved, keys))
        if shimmed and None in groups.restored(live, saved, keys):
            return Outcome("refused", f"the job's groups have other {differing} than those saved")
        names = {groups.named(group, keys) for group in saved}
        if any(groups.named(group, keys) not in names for group in live):
            why = "Megatron finds a group by its learning rates: the load ends in a KeyError"
            return Outcome("fails", why, _written(unlike) or "the saved decoupled rates")
        if differing and not shimmed:
            why = f"Megatron does not tell its parameter groups apart by {differing}"
            return Outcome("misread", f"{why}: all would get the settings of the last")
        given += f", if the job's groups have the saved {differing}" if differing else ""
    if unlike and core < groups.RATES_SINCE:
        return f"{given}, with the saved {_written(unlike)} whatever the job's config says"
    return f"{given}, if the job has {_written(unlike)} (else: a KeyError)" if unlike else given


def _written(rates: Mapping[str, Any]) -> str:
    return ", ".join(f"{field}={rate}" for field, rate in sorted(rates.items()))


def _go_on(part: CheckpointPart, live: Live, given: str) -> Outcome:
    masters = "int16 remainders" if part.masters == REMAINDERS else "fp32 masters"
    kept = "fp32"
    if live.precision_aware:
        kept = "int16 remainders" if live.remainders else "fp32 masters"
        kept += "".join(f", {name} {live.states[name]}" for name in MOMENTS)
    return Outcome("exact", f"{masters} and moments go on in {kept}{given}")


def _scaler(part: CheckpointPart, live: Live) -> Outcome | None:
    """The outcome for Megatron's scaler; ``None`` if it continues from the checkpoint."""
    if live.params != "fp16":
        return None
    if part.scaler.state == "damaged":
        return Outcome("fails", f"the loss scaler's state is damaged: {part.scaler.text}")
    because = ""
    if part.scaler.state == "none":
        because = "it has no loss scaler's state: the scale begins anew"
    elif part.facts.get("scalers_differ"):
        because = "its dense and expert optimizers have different scales: all go on with the first"
    return Outcome("starts anew", because) if because else None
