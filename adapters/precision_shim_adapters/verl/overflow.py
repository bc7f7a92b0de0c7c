"""verl on Megatron in fp16: a skipped step in verl's words, and in its metrics.

verl raises ``NotImplementedError`` for every step that Megatron did not take; its engines from a
method of their own, 0.7.1's legacy workers inline. It breaks on a grad norm that is None: the SFT
trainer pops the missing key, and the trainers take the mean. So a skipped step is handed to it as a
step with grad norm NaN. Its learning rate schedulers and counters go on, as they do in verl's FSDP
engines.
"""

from __future__ import annotations

from typing import Any

import torch

from precision_shim.adapting import current_settings
from precision_shim.errors import SettingsError

from ..megatron import current_build
from ..megatron_overflow import metrics, skipping
from .fsdp import figures
from .megatron import _KEY, _read, _VerlBuild, _WithOverrides

_FIELDS = {"loss_scale_init": "initial_loss_scale", "growth_interval": "loss_scale_window"}
"""The shim's settings, to the fields of Megatron's OptimizerConfig."""

_VERLS_MINIMUM = 1
"""``min_loss_scale`` in verl's fp16 branch."""


# -- the step ----------------------------------------------------------------------------------


def step_engine(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around ``MegatronEngine.optimizer_step``."""
    subject = "critic" if getattr(instance, "is_value_model", False) else "actor"
    with skipping("verl", subject, succeeds=True):
        return wrapped(*args, **kwargs)


def update_policy(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around 0.7.1's ``MegatronPPOActor.update_policy``."""
    with skipping("verl", "actor", succeeds=True):
        found = wrapped(*args, **kwargs)
    found.update(metrics(instance.actor_optimizer, "actor/"))
    return found


def update_critic(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around 0.7.1's ``MegatronPPOCritic.update_critic``."""
    with skipping("verl", "critic", succeeds=True):
        found = wrapped(*args, **kwargs)
    found.update(metrics(instance.critic_optimizer, "critic/"))
    return found


# -- metrics -----------------------------------------------------------------------------------


def report(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around ``TrainingWorker._postprocess_output``: beside the grad norm, which has it too.

    Not earlier: what is among the metrics before is gathered over the data-parallel ranks, and a
    number then becomes a list, over which ``train_mini_batch`` breaks.
    """
    import verl.utils.tensordict_utils as tu

    output = wrapped(*args, **kwargs)
    figures = metrics(getattr(instance.engine, "optimizer", None))
    found = tu.get(output, "metrics") if figures else {}
    if "grad_norm" in found:  # a step was made: neither evaluation nor a backward pass alone
        tu.assign_non_tensor(output, metrics={**found, **figures})
    return output


def report_step(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Around ``TinkerTrainingWorker.optimizer_step``, which steps outside ``train_batch``."""
    found = wrapped(*args, **kwargs)
    if "grad_norm" in found:  # of one of the two engines: Megatron's counts, or FSDP's scaler
        found.update(metrics(getattr(instance.engine, "optimizer", None)))
        found.update(figures(getattr(instance.engine, "scaler", None)))
    return found


# -- the scaler's settings ---------------------------------------------------------------------


def scale_from_settings(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Bring the variables that the user set beneath ``override_optimizer_config``.

    Raises:
        SettingsError: the first scale is below the scaler's minimum.
    """
    settings = current_settings()
    asked = {field: settings[key] for key, field in _FIELDS.items() if settings.is_set(key)}
    # Not bound to verl's signature: the layers beneath take bf16= on versions that lack it.
    flagged = args[2] if len(args) > 2 else kwargs.get("fp16", False)
    build = current_build()
    model = build.seen.single if isinstance(build, _VerlBuild) else None
    fp16 = model is torch.float16 if model is not None else bool(flagged)
    if not asked or not fp16:
        return wrapped(*args, **kwargs)
    kwargs = dict(kwargs)
    config = args[0] if args else kwargs.pop("optim_config")
    written = _read(config, _KEY) or {}
    values = {**asked, **{str(key): written[key] for key in written}}
    least = values.get("min_loss_scale", _VERLS_MINIMUM)
    first = values.get("initial_loss_scale")
    if "initial_loss_scale" not in written and first is not None and first < least:
        raise SettingsError(
            f"PRECISION_SHIM_LOSS_SCALE_INIT={first:g} is below min_loss_scale={least:g} of "
            f"Megatron's scaler. Raise it, or lower {_KEY}.min_loss_scale."
        )
    return wrapped(_WithOverrides(config, values), *args[1:], **kwargs)
