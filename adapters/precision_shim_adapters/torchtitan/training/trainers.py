"""The symbols of torchtitan's trainers, and functions that several modules of this adapter use."""

from __future__ import annotations

from typing import Any

from precision_shim.adapting import NativeProbe, look

from ...frameworks import TITAN_PRETRAINING
from ...torch_fp16 import FEATURE

FRAMEWORK = "torchtitan"

RL = "rl"
PRETRAINING = TITAN_PRETRAINING
METRICS = "pretraining metrics"
NAMES = "names"
ROLLOUT = "rollout"
"""Names of the groups of torchtitan's seams."""

POLICY = "torchtitan.experiments.rl.actors.trainer:PolicyTrainer"
CONTROLLER = "torchtitan.experiments.rl.controller:Controller"
GENERATORS = "torchtitan.experiments.rl.actors.generator:VLLMGenerator"
TRAINER = "torchtitan.trainer:Trainer"

UPSTREAM = "https://github.com/pytorch/torchtitan/pull/3897"
DELETE = "torchtitan scales the loss of float16 training and saves the scaler"
SCALED: dict[str, Any] = {"feature": FEATURE, "upstream": UPSTREAM, "delete_when": DELETE}
"""Arguments that all seams for loss scaling share."""


def _native(step: str, trainer: str) -> NativeProbe:
    def native(symbol: object, settings: object) -> str | None:
        """Return a reason to skip the seam if torchtitan has a scaler; no version has one yet."""
        names = (name.lower() for name in look(step).names if name.isidentifier())
        scaler = any("scaler" in name for name in names)
        return f"torchtitan's {trainer} has a loss scaler of its own" if scaler else None

    return native


native_pretraining = _native(f"{TRAINER}.train_step", "Trainer")
ON_PRETRAINING: dict[str, Any] = {"group": PRETRAINING, "native": native_pretraining}
ON_RL: dict[str, Any] = {"group": RL, "native": _native(f"{POLICY}.optim_step", "RL trainer")}
BOTH = (ON_RL, ON_PRETRAINING)
"""Arguments of seams on the RL trainer (``ON_RL``), on ``Trainer`` (``ON_PRETRAINING``) or both."""


def of_both(method: str) -> list[dict[str, Any]]:
    """The seam targets for a method that ``PolicyTrainer`` and ``Trainer`` both have."""
    return [
        {"target": f"{POLICY}.{method}", "optional": True, **ON_RL},
        {"target": f"{TRAINER}.{method}", **ON_PRETRAINING},
    ]
