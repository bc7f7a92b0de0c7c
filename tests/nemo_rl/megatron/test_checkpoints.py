"""NeMo-RL saves Megatron workers, the shim is turned on or off, and NeMo-RL resumes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

import precision_shim

from ...every_framework.checkpoint_doctor import ask, told_by
from ...stand_ins.optimizer_states import live_states, reads_remainders
from ..support import batch, nll_loss
from .support import FP16

Make = Callable[..., AbstractContextManager[Any]]

PRECISION_AWARE = "use_precision_aware_optimizer"
OWN = {"optimizer": {PRECISION_AWARE: True}}
"""The optimizer setting in NeMo-RL's own YAML files."""

LEFT_OPEN = {
    "drop": (PRECISION_AWARE,),
    "optimizer": {"adam_beta2": 0.95},
    "ddp": {"grad_reduce_in_fp32": False},
}
"""A config in which ``follow-model`` makes the optimizer precision-aware."""


def states(made: Any) -> dict[str, torch.Tensor]:
    """Copies of fp32 masters, moments and parameters, and of the scaler's state."""
    found = {
        f"parameter {index}": one.detach().clone()
        for index, one in enumerate(made.model.parameters())
    }
    for index, (_, master, state) in enumerate(live_states(made.optimizer)):
        for name, value in (("master", master), *state.items()):
            if name != "master_param" and torch.is_tensor(value):
                found[f"{name} {index}"] = value.detach().float().clone()
    for one in getattr(made.optimizer, "chained_optimizers", [made.optimizer]):
        if one.grad_scaler is not None:
            for name, value in one.grad_scaler.state_dict().items():
                found[f"scaler {name}"] = torch.as_tensor(value).float().clone()
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Switch:
    """Trains and saves a worker, resumes in another, and compares both."""

    def __init__(self, worker: Make, folder: Path, precision: str, **config: Any) -> None:
        self.worker, self.folder = worker, folder
        self.precision, self.config = precision, config
        self.settings: dict[str, Any] = {}

    def go_on(self, first_on: bool, second_on: bool) -> str:
        """Returns ``exact``, ``exact until it trains``, ``other weights``, or an error's name."""
        folder = self.folder / f"{first_on}-{second_on}"
        paths = {
            "weights_path": str(folder / "weights"),
            "optimizer_path": str(folder / "optimizer"),
        }
        # In float16 some steps are skipped before the save, and some after it.
        saved_at, end = (4, 7) if self.precision == "float16" else (2, 4)
        self._turn(first_on)
        with self.worker(self.precision, **self.config) as made:
            self._train(made, range(saved_at))
            made.save_checkpoint(**paths)
            saved = states(made)
            self._train(made, range(saved_at, end))
            straight = states(made)
        self._turn(second_on)
        declared_states = ask(folder / "weights", "nemo-rl", self._asked()).outcome
        done = self._resume(paths, saved, straight, range(saved_at, end))
        assert declared_states.verdict == told_by(done), declared_states
        return done

    def _resume(self, paths: dict[str, str], saved: Any, straight: Any, seeds: range) -> str:
        try:
            with self.worker(self.precision, options=paths, **self.config) as made:
                if not same(saved, states(made)):
                    return "other weights"
                self._train(made, seeds)
                return "exact" if same(straight, states(made)) else "exact until it trains"
        except Exception as error:  # Megatron raises several kinds
            return type(error).__name__

    def _asked(self) -> dict[str, Any]:
        """Return the keys for optimizer and bucket in the policy's config."""
        left_out = self.config.get("drop", ())
        default = {} if PRECISION_AWARE in left_out else {PRECISION_AWARE: False}
        return {**default, **self.config.get("optimizer", {}), **self.config.get("ddp", {})}

    def _turn(self, on: bool) -> None:
        precision_shim.uninstall()
        if on:
            precision_shim.install(settings=self.settings)

    def _train(self, made: Any, seeds: range) -> None:
        for seed in seeds:
            made.train(batch(seed=seed), nll_loss())


@pytest.fixture
def switch(worker: Make, shim: Any, fused_adam: str, tmp_path: Path) -> Callable[..., Switch]:
    def make(precision: str, **config: Any) -> Switch:
        return Switch(worker, tmp_path, precision, **config)

    return make


@pytest.mark.slow
def test_remainders_that_the_config_asks_for_stay_remainders(switch: Any) -> None:
    """If the shim is off at the resume, the job resumes like a job that never had the shim."""
    job = switch("bfloat16", **OWN)
    by_itself = job.go_on(first_on=False, second_on=False)
    assert (by_itself == "exact") == reads_remainders()
    assert job.go_on(first_on=True, second_on=False) == by_itself
    assert job.go_on(first_on=True, second_on=True) == "exact"
    assert job.go_on(first_on=False, second_on=True) == "exact"


@pytest.mark.slow
def test_remainders_that_the_shim_made_are_written_as_whole_masters(switch: Any) -> None:
    job = switch("bfloat16", **LEFT_OPEN)
    job.settings = {"optimizer_states": "follow-model"}
    assert job.go_on(first_on=True, second_on=True) == "exact"
    # Without the shim the optimizer states are fp32, so Megatron no longer rounds them.
    assert job.go_on(first_on=True, second_on=False) == "exact until it trains"
    assert job.go_on(first_on=False, second_on=True) == "CheckpointLayoutError"


def test_float16_goes_on_with_its_scaler(switch: Any) -> None:
    scaler = {**FP16, "initial_loss_scale": 2.0**22, "hysteresis": 1, "loss_scale_window": 3}
    assert switch("float16", optimizer=scaler).go_on(first_on=True, second_on=True) == "exact"
