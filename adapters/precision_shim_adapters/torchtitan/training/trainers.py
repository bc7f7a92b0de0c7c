"""The symbols of torchtitan's trainers, and functions that several modules of this adapter use."""

from __future__ import annotations

from typing import Any

import torch

from precision_shim.adapting import NativeProbe, look, versioned
from precision_shim.errors import DtypeError
from precision_shim.precision.dtypes import parse_dtype

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

OWN_NAMES = {getattr(torch, name): name for name in ("float16", "bfloat16", "float32")}
"""Maps each dtype in which torchtitan trains and generates to torchtitan's only name for it."""


def computes_in_float16(training: Any) -> bool:
    """Whether a ``TrainingConfig`` makes the model compute in float16."""
    name = training.mixed_precision_param
    return isinstance(name, str) and parse_dtype(name) is torch.float16


def refuse_float16_states(training: Any, place: str = "training.") -> None:
    """Raise a ``DtypeError`` if a config has parameters and optimizer states in float16."""
    if isinstance(training.dtype, str) and parse_dtype(training.dtype) is torch.float16:
        raise DtypeError(
            f"{versioned(FRAMEWORK)}: {place}dtype={training.dtype!r} puts parameters and "
            "optimizer states into float16, where AdamW's eps of 1e-8 is 0 and parameters are not "
            "finite after a few finite steps; allowed: float32, bfloat16. Leave "
            f"{place}dtype out, and set {place}mixed_precision_param=float16 to compute in fp16.",
            key=f"{place}dtype",
        )


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
