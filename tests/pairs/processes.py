"""A pair's rank processes on every backend; ``processes/rank_server.py`` starts them."""

from __future__ import annotations

import hashlib
import json
import math
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch

import precision_shim

from ..every_framework.checkpoint_doctor import verdict
from ..every_framework.shim_warnings import ours
from ..processes.rank_server import Launch
from .drawing import OFF, Job, Pair, parse


class Training(Protocol):
    """The model, optimizer and scaler of one job.

    Attributes:
        asked: the job's config, as the checkpoint doctor takes it.
    """

    asked: dict[str, Any]

    def steps(self, steps: range, overflows: tuple[int, ...]) -> list[list[Any]]:
        """Train; returns the losses and the gradient norm of each step."""

    def state(self) -> dict[str, Any]:
        """Digests of this rank's states by component, which are equal after two equal trainings."""

    def effective(self) -> dict[str, Any]:
        """The settings that two trainings must share so that their next steps are equal."""

    def save(self, directory: Path) -> None:
        """Write a checkpoint."""

    def load(self, directory: Path) -> None:
        """Read a checkpoint."""


def run(launch: Launch, build: Callable[[Pair, Job], Training]) -> dict[str, Any]:
    """Run one job of a pair on one rank; returns its results.

    Options: ``pair``, the pair's text, and ``number``, the job's number.
    """
    pair, number = parse(launch.options["pair"]), launch.options["number"]
    job, last = pair.jobs[number], number == len(pair.jobs) - 1
    directory = Path(launch.folder, "checkpoint")
    found: dict[str, Any] = {"error": None, "phase": "build"}
    said: list[str] = []
    try:
        with ours(said):
            switch(job)
            one = build(pair, job)
            if last:
                found["predicted"] = predicted(directory, one.asked)
                found["phase"] = "load"
                one.load(directory)
                found["state"] = one.state()
                found["phase"] = "train"
                found["next"] = one.steps(range(pair.stop, pair.stop + pair.more), pair.overflowing)
                found["end"] = one.state()
            else:
                found["phase"] = "train"
                one.steps(range(pair.stop), pair.overflowing)
                found["state"] = one.state()
                Path(launch.folder, f"saved-{number}-{launch.rank}.json").write_text(
                    json.dumps(found["state"])
                )
                found["phase"] = "save"
                one.save(directory)
                found["unmoved"] = one.state() == found["state"]
                if number == len(pair.jobs) - 2:
                    found["phase"] = "train"
                    found["next"] = one.steps(
                        range(pair.stop, pair.stop + pair.more), pair.overflowing
                    )
                    found["end"] = one.state()
            found["effective"] = one.effective()
            found["phase"] = ""
    except Exception as error:
        found["error"] = [
            type(error).__name__,
            str(error),
            isinstance(error, precision_shim.PrecisionShimError),
        ]
        traceback.print_exc()
    found["said"] = said
    found["decisions"] = [f"{one.chosen}; {one.because}" for one in _decisions()]
    return found


def predicted(directory: Path, asked: dict[str, Any]) -> str:
    """The checkpoint doctor's verdict on the resume that follows."""
    try:
        return verdict(directory, "verl", asked)
    except precision_shim.PrecisionShimError as error:
        return str(error)


def _decisions() -> Iterable[Any]:
    return precision_shim.status().decisions


def switch(job: Job) -> None:
    """Install the shim with a job's features and settings, unless ``job.shim`` is off."""
    if job.shim == OFF:
        return
    chosen = {
        "optimizer_states": job.policy,
        "loss_scale_init": job.init,
        "growth_interval": job.interval,
    }
    settings = {name: value for name, value in chosen.items() if value}
    features = None if job.shim == "on" else job.shim.split("+")
    precision_shim.install(features=features, settings=settings)


def numbers(values: Iterable[Any]) -> list[str]:
    """Numbers as text, which keeps all bits and is equal for two NaN."""
    return ["nan" if math.isnan(one) else float(one).hex() for one in map(float, values)]


def bits(tensors: Iterable[torch.Tensor]) -> str:
    """A digest of the tensors' values, which is equal for bf16 and fp32 of equal values."""
    digest = hashlib.sha256()
    for one in tensors:
        flat = one.detach().reshape(-1).float().contiguous().cpu()
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
