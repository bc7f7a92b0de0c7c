"""The workers that AReaL's own schedulers and launcher start train in fp16 with the shim.

The job's processes get the shim from the variable and the installed package's start-up file alone.
``tests/areal/site`` lets each of the processes run on a CPU.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..pages import documented
from ..processes.ray_cluster import QUIET, older
from .cpu import METHODS
from .test_pages import YAML

ROOT = Path(__file__).parents[2]
JOB = str(Path(__file__).with_name("job.py"))
PAGE = ROOT / "docs" / "start" / "areal.md"
PATCHED = [*METHODS, "get_megatron_optimizer"]
NOTHING: dict[str, Any] = {"enabled": False, "patched": [], "decided": []}
KEYS = ("grad_norm", "update_successful", "loss_scale", "skipped_steps")
WORKER = "{cpu: 1, gpu: 0, mem: 1, cmd: python3 -m areal.infra.rpc.rpc_server, env_vars: {%s}}"
ACTOR = """
  kl_ctl: 0.0
  ppo_n_minibatches: 1
  reward_clip: 1.0e+30
  scheduling_spec: [%s]
""" % (WORKER % "")
CRITIC = """
critic:
  backend: "megatron:d1"
  experiment_name: tests
  trial_name: one
  path: none
  dtype: float16
  is_critic: true
  optimizer: {type: adam}
  scheduling_spec: [%s]
""" % (WORKER % "PRECISION_SHIM: 0")
HALVE = "++actor.optimizer.hysteresis=1"
"""Each skipped step halves the scale; by default every second one does."""
pytestmark = [pytest.mark.usefixtures("start_up_file"), pytest.mark.timeout(1200)]


def run(
    folder: Path, *words: str, python: tuple[str, ...] = (JOB,), more: str = "", **variables: str
) -> tuple[dict[str, Any], str]:
    """Run a job of AReaL's with an actor in fp16.

    Args:
        folder: an empty folder.
        *words: overrides of the config.
        python: the arguments of Python before those of the script.
        more: YAML of the config, beside the actor's.
        **variables: the job's variables, beside all inherited variables except the shim's.

    Returns:
        What the script found, and the output of all of the job's processes.
    """
    text = YAML.replace("\n  dtype: bfloat16\n", "\n  dtype: float16" + ACTOR)
    text = text.replace("fileroot: none", f"fileroot: {folder}")
    records = f"name_resolve: {{type: nfs, nfs_record_root: {folder}}}"
    text = text.replace("cluster: {", f"cluster: {{{records}, ")
    (folder / "job.yaml").write_text(text + more)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PRECISION_SHIM")}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(Path(JOB).with_name("site")), str(ROOT)]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        **variables,
    }
    command = [sys.executable, *python, "--config", str(folder / "job.yaml"), *words]
    with (folder / "log").open("w") as log, _group(command, environment, log) as job:
        job.wait(timeout=800)
    said = (folder / "log").read_text()
    lines = [one for one in said.splitlines() if one.startswith("FOUND ")]
    if not lines and "EADDRINUSE" in said:  # AReaL chooses its ports before it uses them
        (folder / "again").mkdir()
        return run(folder / "again", *words, python=python, more=more, **variables)
    assert lines, said[-5000:]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("FOUND "))
    return found, said


@contextlib.contextmanager
def _group(command: list[str], environment: dict[str, str], log: Any) -> Iterator[Any]:
    """A process in a group of its own, with which the processes that it started end."""
    job = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
    )
    try:
        yield job
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def figures(found: dict[str, Any]) -> list[list[Any]]:
    """The figures ``KEYS`` of each step; ``None`` stands for a missing one, "nan" for NaN."""
    steps = [[one.get(f"ppo_actor/update/{key}") for key in KEYS] for one in found["steps"]]
    return [["nan" if one is not None and math.isnan(one) else one for one in s] for s in steps]


def page_lines() -> list[str]:
    """The lines of the shim that the start page shows."""
    blocks = (" ".join(one.split()) for one in documented.blocks(PAGE))
    return [one for one in blocks if one.startswith("[precision_shim]")]


def assert_trained(found: dict[str, Any], said: str) -> None:
    """The steps are: trained, skipped, trained with half the scale."""
    assert found["actor"]["enabled"]
    assert found["actor"]["patched"] == PATCHED
    norms, successes, scales, skipped = zip(*figures(found), strict=True)
    assert norms[1] == "nan"
    assert all(one > 0 for one in (norms[0], norms[2]))
    assert successes == (1.0, 0.0, 1.0)
    assert scales == (32768.0, 32768.0, 16384.0)  # before the step
    assert skipped == (0.0, 1.0, 1.0)
    for line in page_lines():  # rank 0 alone says it
        assert said.count(line) == 1, line


def test_the_local_scheduler(tmp_path: Path) -> None:
    """A process of AReaL's RPC server for each role; the critic's is left out by ``env_vars``."""
    words = ("scheduler.type=local", "actor.backend=megatron:d1", HALVE)
    found, said = run(tmp_path, *words, more=CRITIC, PRECISION_SHIM="1")
    assert_trained(found, said)
    assert (found["rollout"], found["decided"]) == ("float16", ["fp16, as the actor"])
    assert found["critic"] == NOTHING


@pytest.mark.slow
def test_the_launcher(tmp_path: Path) -> None:
    """AReaL's launcher runs the script in a process of torchrun, which makes the engine itself."""
    script = ("-m", "areal.infra.launcher.local", JOB)
    words = ("++allocation_mode=megatron:d1", "actor.backend=megatron:d1", HALVE)
    assert_trained(*run(tmp_path, *words, python=script, PRECISION_SHIM="1"))


@pytest.mark.slow
def test_the_ray_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster was started without the variable; AReaL leaves ``ray.init`` to Ray.

    Of two processes, the overflow of one is skipped on both.
    """
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    words = ("scheduler.type=ray", "actor.backend=megatron:d2", HALVE)
    with older(num_cpus=4):
        found, said = run(tmp_path, *words, PRECISION_SHIM="1")
    assert_trained(found, said)
    assert found["asked"] == ["areal.infra.rpc.ray_rpc_server.RayRPCServer"]
