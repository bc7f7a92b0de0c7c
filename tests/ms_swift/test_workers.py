"""Jobs of ms-swift's own command, with nothing of ours but ``PRECISION_SHIM`` in the environment.

``megatron`` starts torchrun, which starts the trainer; with ``--use_ray`` it starts a driver, whose
Ray actor trains. The real pipeline reads arguments and dataset, makes the trainer and runs its
steps. ``cpu.enter`` puts the stand-ins for a GPU in each of these processes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ..pages.documented import ROOT
from ..processes.ray_cluster import QUIET
from .cpu import OVERFLOW

pytestmark = [pytest.mark.usefixtures("start_up_file"), pytest.mark.timeout(900)]

PLACE = Path(__file__).with_name("job")
"""The folder of ``sitecustomize`` and of the plugin that each job names."""

STEPS = 5
FIRST = 32768.0
RAY = {
    **QUIET,
    "RAY_ADDRESS": "local",
    "RAY_OVERRIDE_RESOURCES": '{"GPU": 1, "CPU": 4}',
    "CUDA_VISIBLE_DEVICES": "0",  # Ray counts the GPUs that this variable names
}


@dataclass(frozen=True)
class Ended:
    """A job that has ended: its exit status, its output, and the folder of its results."""

    status: int
    said: str
    folder: Path

    @property
    def logs(self) -> list[dict[str, Any]]:
        """The lines that ms-swift's trainer has logged, one for each step."""
        place = self.folder / "logging.jsonl"
        lines = place.read_text(encoding="utf-8").splitlines() if place.exists() else []
        found = [json.loads(line) for line in lines]
        return [one for one in found if "grad_norm" in one]

    def look(self) -> dict[str, Any]:
        """What the plugin has found in the trainer's process."""
        found: dict[str, Any] = json.loads((self.folder / "look.json").read_text("utf-8"))
        return found


class Job:
    """A job of ms-swift's command, in a session of its own, so that all its processes end."""

    def __init__(self, folder: Path, *words: str, **variables: str) -> None:
        self._folder = folder
        self._sockets = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # Ray's paths have to be short
        self._log = folder.with_suffix(".log").open("w+", encoding="utf-8")
        inherited = {
            name: value
            for name, value in os.environ.items()
            # Without the source tree on the path, the installed package is tested.
            if not name.startswith(("PRECISION_SHIM", "RAY_", "PYTHONPATH"))
        }
        self._process = subprocess.Popen(
            [str(Path(sys.executable).with_name("megatron")), *words],
            cwd=folder.parent,
            env={
                **inherited,
                "PYTHONPATH": os.pathsep.join((str(PLACE), str(ROOT))),
                "OMP_NUM_THREADS": "1",
                "RAY_TMPDIR": self._sockets,
                **variables,
            },
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def end(self, timeout: float = 800) -> Ended:
        """Wait for the job; if it goes on after ``timeout`` seconds, kill it."""
        try:
            status = self._process.wait(timeout)
        finally:
            self.kill()
        self._log.seek(0)
        with self._log:
            return Ended(status, self._log.read(), self._folder)

    def kill(self) -> None:
        """End the job's processes; torchrun and Ray's driver end those that they started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self._process.pid, number)
                self._process.wait(timeout=60)
        shutil.rmtree(self._sockets, ignore_errors=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's directory as ms-swift reads it: its config and its tokenizer, no weights."""
    from transformers import Qwen2Config, Qwen2Tokenizer

    place = tmp_path_factory.mktemp("model")
    letters = {chr(one): number for number, one in enumerate(range(ord("a"), ord("z") + 1))}
    Qwen2Tokenizer(vocab=letters, merges=[]).save_pretrained(place)
    Qwen2Config(
        vocab_size=32, hidden_size=16, architectures=["Qwen2ForCausalLM"], dtype="bfloat16"
    ).save_pretrained(place)
    return place


def arguments(folder: Path, model: Path, **own: Any) -> dict[str, Any]:
    """A job's arguments; ``own`` are the ones of a test."""
    rows = []
    for number in range(8):
        weight = OVERFLOW if number in (1, 2) else 1.0
        answer = {"role": "assistant", "content": "yes", "loss_scale": weight}
        rows.append({"messages": [{"role": "user", "content": "say yes"}, answer]})
    dataset = folder.with_suffix(".jsonl")
    dataset.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return {
        "model": model,
        "model_type": "qwen2",
        "template": "qwen",
        "dataset": dataset,
        "load_from_cache_file": False,
        "split_dataset_ratio": 0,
        "dataset_shuffle": False,
        "dataloader_num_workers": 0,
        "torch_dtype": "float16",
        "ddp_backend": "gloo",
        "attention_backend": "local",
        "padding_free": False,
        "micro_batch_size": 1,
        "train_iters": STEPS,
        "logging_steps": 1,
        "max_length": 512,
        "lr": 0.01,
        "output_dir": folder,
        "add_version": False,
        "check_model": False,
        "no_save_optim": True,
        "save_safetensors": False,
        "external_plugins": PLACE / "plugin.py",
        "callbacks": "look",
        **own,
    }


def torchrun(folder: Path, model: Path, **variables: str) -> Job:
    """The second command of the start page; its dataset has weights that overflow."""
    own = {
        "is_binary_loss_scale": False,  # a message's loss_scale may be any weight
        "train_dataloader_shuffle": False,
        "global_batch_size": 1,
    }
    words = [f"--{name}={value}" for name, value in arguments(folder, model, **own).items()]
    gpus = {"NPROC_PER_NODE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return Job(folder, "sft", *words, **gpus, **variables)


def ray(folder: Path, model: Path, **variables: str) -> Job:
    """GRPO with the real driver, pool, worker group and actor; a stand-in answers for vLLM."""
    own = {
        "rlhf_type": "grpo",
        "global_batch_size": 2,
        "num_generations": 2,
        "max_completion_length": 16,
        "reward_funcs": ["weights"],
        "scale_rewards": "none",
        "offload_model": True,
        "offload_optimizer": True,
        "colocate_groups": [["train", "rollout"]],
        "train": {"gpus": 1},
        "rollout": {"gpus": 1},
    }
    config = folder.with_suffix(".yaml")  # JSON is YAML
    config.write_text(json.dumps(arguments(folder, model, **own), default=str), encoding="utf-8")
    return Job(folder, "rlhf", "--use_ray", "true", "--config", str(config), **RAY, **variables)


@pytest.mark.parametrize("start", [torchrun, pytest.param(ray, marks=pytest.mark.slow)])
def test_the_variable_alone_reaches_the_trainer(
    start: Callable[..., Job], model: Path, tmp_path: Path
) -> None:
    """A step, two that overflow, of which the second halves the scale (hysteresis 2), and two."""
    done = start(tmp_path / "with", model, PRECISION_SHIM="1").end()
    assert done.status == 0, done.said[-5000:]
    found = done.look()
    assert (found["shim"], found["check_for_nan_in_grad"]) == (True, False)
    assert found["buckets"] == ["torch.float32"]
    assert found["started_by"] == start.__name__
    if found["started_by"] == "ray":  # the checkpoint, whose dtype vLLM takes, is in bf16
        assert "the model computes in fp16 (torch_dtype), the rollout in bf16" in done.said
    logs = done.logs
    assert [one["iteration"] for one in logs] == [f"{step}/{STEPS}" for step in range(1, STEPS + 1)]
    assert [one["skipped_steps"] for one in logs] == [0, 1, 2, 2, 2]
    assert [one["loss_scale"] for one in logs] == [FIRST] * 3 + [FIRST / 2] * 2
    norms = [one["grad_norm"] for one in logs]
    assert [math.isnan(one) for one in norms] == [False, True, True, False, False]
    assert all(norms)
