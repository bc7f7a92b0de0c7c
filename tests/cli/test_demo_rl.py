"""``demo --rl`` without a real job: what it reads, prints, refuses and ends. The jobs: tests/rl."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from examples.demo.rl import results
from examples.demo.rl.jobs import FORCED, JOBS
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


def course(k3=1e-4, reward=(0.5, 0.9), scale=(), skipped=()):
    return Course([1, 2], [*reward], [k3] * 2, [*scale], [*skipped], [1.0, 1.0])


def jobs(**third):
    """Each job's courses, of one seed, and the forced overflows; by default all promises hold."""
    forced = {"scale": (4.0, 2.0), "skipped": (1.0, 1.0)}
    forced = {name: third.pop(name, default) for name, default in forced.items()}
    ours = [course(**{"k3": 1e-6, **third})]
    return [[course()], [course()], ours, [course(k3=1e-6)]], course(**forced)


def test_verls_metrics_are_read_while_it_still_writes_them(tmp_path):
    file = tmp_path / "job.jsonl"
    assert results.read(file) == Course([], [], [], [], [], [])
    first = {METRICS["reward"]: 0.25, METRICS["k3"]: 2e-5, "timing_s/step": 3.0}
    second = {**first, METRICS["reward"]: 0.5, METRICS["scale"]: 8.0, METRICS["skipped"]: 1.0}
    lines = [json.dumps({"step": n, "data": d}) for n, d in enumerate(({"a": 1}, first, second))]
    file.write_text("\n".join(lines) + '\n{"step": 3, "da')
    assert results.read(file) == Course([1, 2], [0.25, 0.5], [2e-5, 2e-5], [8.0], [1.0], [3.0, 3.0])


@pytest.mark.parametrize(
    ("third", "broken"),
    [
        ({}, None),
        ({"k3": 2e-5}, "k3"),
        ({"reward": (0.1, 0.2)}, "reward"),
        ({"skipped": (0.0, 0.0)}, "overflows"),
        ({"scale": (), "skipped": ()}, "overflows"),
    ],
)
def test_a_promise_that_is_not_kept_is_named(third, broken):
    found = [each.name for each in results.check(*jobs(**third)) if not each.ok]
    assert len(found) == (broken is not None)
    assert all(broken in name for name in found)


def test_the_jobs_differ_in_their_dtypes_alone(tmp_path):
    commands = [set(job.command(tmp_path, 3)) for job in JOBS]
    for one in commands[1:]:
        differing = {key.partition("=")[0] for key in one ^ commands[0]}
        assert all("dtype" in key for key in differing)
    assert commands[1] == commands[2], "the shim alone makes the difference"
    every = [job.environment(tmp_path) for job in (*JOBS, FORCED)]
    assert [one["PRECISION_SHIM"] for one in every] == ["0", "0", "1", "0", "1"]
    scaled = ["PRECISION_SHIM_LOSS_SCALE_INIT" in one for one in every]
    assert scaled == [False] * 4 + [True], "compared at the default loss scale"
    assert FORCED.command(tmp_path, 3) == JOBS[2].command(tmp_path, 3)


def test_the_picture_needs_no_more_than_the_metrics(tmp_path):
    four, forced = jobs()
    named = {job.title: each for job, each in zip(JOBS, four, strict=True)}
    results.draw(tmp_path / "rl.png", named, forced, ("four", "forced"))
    assert (tmp_path / "rl.png").read_bytes().startswith(b"\x89PNG")


def test_the_users_settings_and_cluster_stay_out_of_the_jobs(tmp_path, monkeypatch):
    monkeypatch.setenv("PRECISION_SHIM_FEATURES", "-audit")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    for job in (*JOBS, FORCED):
        environment = job.environment(tmp_path)
        assert "RAY_ADDRESS" not in environment
        assert "PRECISION_SHIM_FEATURES" not in environment
        assert "+ray_kwargs.ray_init.address=local" in job.command(tmp_path, 3)


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


linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


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
