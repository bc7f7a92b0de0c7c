"""The symbols of torchtitan's trainers, and functions that several modules of this adapter use."""

from __future__ import annotations

from typing import Any

from precision_shim.adapting import look

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


def native_pretraining(symbol: object, settings: object) -> str | None:
    """Return a reason to skip the seam if ``Trainer`` has a scaler; no version has one yet."""
    return _scaler_in(f"{TRAINER}.train_step", "Trainer")


def native_rl(symbol: object, settings: object) -> str | None:
    """Return a reason to skip the seam if the RL trainer has a scaler; no version has one yet."""
    return _scaler_in(f"{POLICY}.optim_step", "RL trainer")


def _scaler_in(step: str, trainer: str) -> str | None:
    names = (name.lower() for name in look(step).names if name.isidentifier())
    scaler = any("scaler" in name for name in names)
    return f"torchtitan's {trainer} has a loss scaler of its own" if scaler else None


ON_PRETRAINING: dict[str, Any] = {"group": PRETRAINING, "native": native_pretraining}
ON_RL: dict[str, Any] = {"group": RL, "native": native_rl}
BOTH = (ON_RL, ON_PRETRAINING)
"""Arguments of seams on the RL trainer (``ON_RL``), on ``Trainer`` (``ON_PRETRAINING``) or both."""


def of_both(method: str) -> list[dict[str, Any]]:
    """The seam targets for a method that ``PolicyTrainer`` and ``Trainer`` both have."""
    return [
        {"target": f"{POLICY}.{method}", "optional": True, **ON_RL},
        {"target": f"{TRAINER}.{method}", **ON_PRETRAINING},
    ]
