"""verl on Megatron in fp16: a skipped step in verl's words, and the scaler's settings.

verl raises ``NotImplementedError`` for every step that Megatron did not take; its engines from a
method of their own, 0.7.1's legacy workers inline. It breaks on a grad norm that is None: the SFT
trainer pops the missing key, and the trainers take the mean. So a skipped step is handed to it as a
step with grad norm NaN. Its learning rate schedulers and counters go on, as they do in verl's FSDP
engines.
"""

from __future__ import annotations

from typing import Any

import torch

from ..megatron import current_build
from ..megatron_overflow import metrics, scaler_settings, skipping, with_scaler_settings
from .megatron import _KEY, _read, _VerlBuild, _WithOverrides

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


# -- the scaler's settings ---------------------------------------------------------------------


def scale_from_settings(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Bring the variables that the user set beneath ``override_optimizer_config``.

    Raises:
        SettingsError: the first scale is below the scaler's minimum.
    """
    # Not bound to verl's signature: the layers beneath take bf16= on versions that lack it.
    flagged = args[2] if len(args) > 2 else kwargs.get("fp16", False)
    build = current_build()
    model = build.seen.single if isinstance(build, _VerlBuild) else None
    fp16 = model is torch.float16 if model is not None else bool(flagged)
    if not scaler_settings() or not fp16:
        return wrapped(*args, **kwargs)
    kwargs = dict(kwargs)
    config = args[0] if args else kwargs.pop("optim_config")
    written = _read(config, _KEY) or {}
    values = with_scaler_settings({str(key): written[key] for key in written}, _KEY)
    return wrapped(_WithOverrides(config, values), *args[1:], **kwargs)
