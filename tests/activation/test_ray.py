"""Tests on a real Ray: which workers the shim reaches, and what it does to a user's runtime_env.

The tests need Ray but no framework: a worker that can report ``status()`` has read the start-up
file. The tests of ``ray job submit`` need ``ray[default]`` for its dashboard.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..processes.ray_cluster import QUIET

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs ray", allow_module_level=True)

DASHBOARD = importlib.util.find_spec("aiohttp_cors") is not None
pytestmark = pytest.mark.usefixtures("start_up_file")
ALL = [
    "dtype-coercion",
    "bf16-dispatch",
    "grad-bucket-alignment",
    "fp16-scaling",
    "rollout-agreement",
    "audit",
]

DRIVER = """
import json, os, sys
import ray, precision_shim

def report():
    import os, precision_shim
    status = precision_shim.status()
    return {
        "enabled": status.enabled,
        "features": status.features,
        "variables": {k: v for k, v in os.environ.items() if k.startswith("PRECISION_SHIM")},
        "theirs": os.environ.get("THEIRS"),
    }

@ray.remote
class Actor:
    def report(self):
        return report()

def actor(**env_vars):
    one = Actor.options(runtime_env={"env_vars": env_vars}) if env_vars else Actor
    return ray.get(one.remote().report.remote())

def task():
    return ray.get(ray.remote(report).remote())

HERE = {"address": sys.argv[1], "log_to_driver": False}
found = {}
"""


def environment(**variables):
    inherited = {
        k: v for k, v in os.environ.items() if not k.startswith(("PRECISION_SHIM", "RAY_"))
    }
    return {**inherited, **QUIET, **variables}


@dataclass
class Cluster:
    """Addresses of a running cluster."""

    gcs: str
    dashboard: str
    client: str
    agent: str


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster for this module alone, started without the variable PRECISION_SHIM."""
    for attempt in range(3):
        with running(tmp_path_factory.mktemp("ray") / "log") as made:
            # On a busy machine a node's agent may never start, but jobs need an agent.
            if attempt == 2 or has_agent(made):
                yield made
                return


@contextlib.contextmanager
def running(log):
    """Start a Ray cluster on free ports, because another cluster may run on this machine."""
    names = (
        *("port", "dashboard-port", "ray-client-server-port", "dashboard-agent-listen-port"),
        *("dashboard-agent-grpc-port", "runtime-env-agent-port", "metrics-export-port"),
    )
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    made = Cluster(
        f"127.0.0.1:{ports['port']}",
        f"http://127.0.0.1:{ports['dashboard-port']}",
        f"ray://127.0.0.1:{ports['ray-client-server-port']}",
        f"http://127.0.0.1:{ports['dashboard-agent-listen-port']}/api/local_raylet_healthz",
    )
    # Ray's temporary folder is not pytest's folder, whose name is too long for a socket. Ray's
    # usual folder is not used either, because Ray looks there for a running cluster to join.
    with tempfile.TemporaryDirectory(prefix="ray") as folder, log.open("w") as output:
        command = [
            str(Path(sys.executable).with_name("ray")),
            *("start", "--head", "--block", "--node-ip-address=127.0.0.1", "--num-cpus=2"),
            *("--object-store-memory=100000000", f"--include-dashboard={DASHBOARD}"),
            *(f"--{name}={port}" for name, port in ports.items()),
            f"--temp-dir={folder}",
        ]
        process = subprocess.Popen(
            command, env=environment(), stdout=output, stderr=output, start_new_session=True
        )
        try:
            deadline = time.monotonic() + 180
            while not is_up(made, log):
                assert process.poll() is None, log.read_text()[-2000:]
                assert time.monotonic() < deadline, log.read_text()[-2000:]
                time.sleep(0.5)
            yield made
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def has_agent(one):
    deadline = time.monotonic() + 60
    while DASHBOARD and not answers(one.agent):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


def is_up(one, log):
    if "Ray runtime started" not in log.read_text():
        return False
    return not DASHBOARD or answers(f"{one.dashboard}/api/version")


def answers(url):
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except OSError:
        return False
    return True


def free_ports(count):
    """Free ports above those of Ray's workers and clients, below those that the system assigns."""
    found = []
    while len(found) < count:
        port = random.randrange(24000, 32000)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            found += [port] if port not in found else []
    return found


@pytest.fixture
def drive(tmp_path, cluster):
    """Return a function that runs a driver on the cluster and returns the driver's ``found``."""

    def run(body, address="", *arguments, **variables):
        program = tmp_path / "driver.py"
        end = '\nray.shutdown()\nprint("FOUND", json.dumps(found))\n'
        program.write_text(DRIVER + body + end)
        for _ in range(3):  # Ray allows a node only 30 seconds to start, too few on a busy machine
            done = subprocess.run(
                [sys.executable, str(program), address or cluster.gcs, *arguments],
                env=environment(**variables),
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            slow = ("timed out during startup", "Initialization failure from server")
            if not any(one in done.stderr for one in slow):
                break
        assert done.returncode == 0, done.stdout + done.stderr
        return found_in(done.stdout)

    return run


def found_in(text):
    (line,) = [one for one in text.splitlines() if one.startswith("FOUND ")]
    return json.loads(line.removeprefix("FOUND "))


def test_task_and_actors(drive):
    body = """
theirs = {"env_vars": {"THEIRS": "job"}}
ray.init(**HERE, runtime_env=theirs)
assert theirs == {"env_vars": {"THEIRS": "job"}}, theirs
found.update(
    task=task(), actor=actor(), own=actor(THEIRS="actor"), off=actor(PRECISION_SHIM="0"),
    job=ray.get_runtime_context().runtime_env,
)
"""
    found = drive(body, PRECISION_SHIM="1", PRECISION_SHIM_LOG="quiet")
    ours = {"PRECISION_SHIM": "1", "PRECISION_SHIM_LOG": "quiet"}
    reached = {"enabled": True, "features": ALL, "variables": ours}
    assert found["task"] == {**reached, "theirs": "job"}
    assert found["actor"] == {**reached, "theirs": "job"}
    assert found["own"] == {**reached, "theirs": "actor"}
    assert not found["off"]["enabled"]
    assert found["job"] == {"env_vars": {"THEIRS": "job", **ours}}


def test_workers_come_up_as_install_was_told(drive):
    body = """
precision_shim.install(features=["fp16-scaling"], settings={"growth_interval": 7}, strict=True)
ray.init(**HERE)
found.update(task=task(), actor=actor())
"""
    expected = {
        "enabled": True,
        "features": ["fp16-scaling"],
        "variables": {
            "PRECISION_SHIM": "1",  # strict is not exported
            "PRECISION_SHIM_FEATURES": "fp16-scaling",
            "PRECISION_SHIM_GROWTH_INTERVAL": "7",
        },
        "theirs": None,
    }
    assert drive(body) == {"task": expected, "actor": expected}


def test_an_install_after_ray_init_is_told(drive):
    """The job's workers are without the shim, unless the caller's runtime_env carries it."""
    body = """
import warnings
for name, env_vars in (("without", {}), ("carried", {"PRECISION_SHIM": "1"})):
    ray.init(**HERE, runtime_env={"env_vars": env_vars})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        notes = precision_shim.install(export=False).notes
    told = [str(one.message) for one in told]
    found[name] = [notes, [one for one in told if one in notes], task()["enabled"]]
    precision_shim.uninstall()
    ray.shutdown()
"""
    found = drive(body)
    assert found["carried"] == [[], [], True]
    notes, told, enabled = found["without"]
    assert (told, enabled) == (notes, False)
    assert "Call install() before ray.init(), or export PRECISION_SHIM=1" in notes[0]


def test_off_is_off_on_a_cluster_that_others_use(drive):
    body = "ray.init(**HERE)\nfound.update(task=task(), actor=actor())\n"
    found = drive(body, PRECISION_SHIM="0")
    assert not found["task"]["enabled"]
    assert not found["actor"]["enabled"]
    assert found["task"]["variables"] == {}


def test_the_shapes_of_a_runtime_env(drive):
    body = """
from ray.job_config import JobConfig
from ray.runtime_env import RuntimeEnv
theirs = {"THEIRS": "job"}
for job in (
    {"runtime_env": RuntimeEnv(env_vars=theirs)},
    {"job_config": JobConfig(runtime_env={"env_vars": theirs})},
):
    ray.init(**HERE, **job)
    found[next(iter(job))] = task()
    ray.shutdown()
"""
    found = drive(body, PRECISION_SHIM="1")
    told = {name: (one["enabled"], one["theirs"]) for name, one in found.items()}
    assert told == {"runtime_env": (True, "job"), "job_config": (True, "job")}


def test_rays_client(drive, cluster):
    body = """
ray.init(**HERE, runtime_env={"env_vars": {"THEIRS": "job"}})
found.update(task=task())
"""
    found = drive(body, cluster.client, PRECISION_SHIM="1")
    assert (found["task"]["enabled"], found["task"]["theirs"]) == (True, "job")


def test_the_hook_goes_and_leaves_the_callers_values(drive):
    body = """
from ray._private import worker
ours = worker.init
assert ray.init is ours and ours.__wrapped__
import cloudpickle
assert cloudpickle.loads(cloudpickle.dumps(ours)) is ours
precision_shim.uninstall()
assert ray.init is worker.init is ours.__wrapped__
precision_shim.install()
assert ray.init is worker.init and ray.init.__wrapped__ is ours.__wrapped__
mine = {"PRECISION_SHIM": "0", "PRECISION_SHIM_FEATURES": "fp16-scaling"}
ray.init(**HERE, runtime_env={"env_vars": mine})
found.update(task=task(), job=ray.get_runtime_context().runtime_env)
"""
    found = drive(body, PRECISION_SHIM="1", PRECISION_SHIM_FEATURES="dtype-coercion")
    mine = {"PRECISION_SHIM": "0", "PRECISION_SHIM_FEATURES": "fp16-scaling"}
    assert found["job"] == {"env_vars": mine}
    assert not found["task"]["enabled"]


def a_framework(folder, code):
    """Write a package ``small`` and its adapter."""
    (folder / "small.py").write_text(code)
    (folder / "small_shim.py").write_text(
        "from precision_shim.adapting import Adapter, collect, seam\n"
        "@seam('small:scale', 'fp16-scaling', why='to be seen')\n"
        "def negate(call):\n    return -call.proceed()\n"
        "ADAPTER = Adapter(\n"
        "    'small', 'small', ('small',), ('1',), collect(negate), actors='small[.]'\n"
        ")\n"
    )
    info = folder / "small-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: small\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[precision_shim.adapters]\nsmall = small_shim:ADAPTER\n"
    )


def test_what_a_function_closes_over_is_the_workers_own(drive, tmp_path):
    """A wrapped symbol pickles by reference, so the worker unpickles its own wrapped symbol."""
    a_framework(tmp_path, "def scale(value):\n    return 2 * value\n")
    body = """
def program():
    from small import scale
    kinds = {"scale": scale}
    def work(value):
        return kinds["scale"](value), type(kinds["scale"]).__name__
    return work

ray.init(**HERE)
work = program()
found.update(driver=work(1), worker=ray.get(ray.remote(work).remote(1)))
"""
    on = {"PRECISION_SHIM": "1", "PRECISION_SHIM_FRAMEWORKS": "small", "PYTHONPATH": str(tmp_path)}
    found = drive(body, **on)
    assert found["driver"] == found["worker"] == [-2, "SeamWrapper"]


def test_the_driver_tells_of_a_worker_without_the_shim(drive, tmp_path):
    a_framework(
        tmp_path,
        "import ray\n"
        "def scale(value):\n    return value\n"
        "@ray.remote(num_cpus=0)\n"
        "class Worker:\n"
        "    def name(self):\n        return 'an actor'\n"
        "@ray.remote(num_cpus=0)\n"
        "def work():\n    return 'a task'\n",
    )
    without = tmp_path / "without"
    without.mkdir()
    (without / "sitecustomize.py").write_text("import sys\nsys.modules['precision_shim'] = None\n")
    body = """
import asyncio, time, warnings
import small
from precision_shim.process import actors, session

told = []
warnings.simplefilter("always")
warnings.showwarning = lambda message, *_: told.append(str(message))
precision_shim.install(strict=True)
names = ((ray.actor.ActorClass, "_remote"), (ray.remote_function.RemoteFunction, "_remote"))
names += ((ray.actor.ActorMethod, "_remote"),)
ours = [getattr(*one) for one in (*names, (ray, "get"))]
precision_shim.uninstall()
before = [getattr(*one) for one in (*names, (ray, "get"))]
assert [one.__wrapped__ for one in ours] == before
ray.init(**HERE)

async def awaited(actor):
    result = await actor.name.remote()
    while session._current.actors._waiting:
        await asyncio.sleep(0.05)
        await actor.name.remote()
    return result

def start(*kinds, strict=False, awaits=False, patience=60.0, **env_vars):
    actors.PATIENCE = patience
    env = {"PRECISION_SHIM": "1", "PRECISION_SHIM_FRAMEWORKS": "small", **env_vars}
    said = []
    for kind in kinds:
        told.clear()
        precision_shim.install(strict=strict)
        one = kind.options(runtime_env={"env_vars": env}).remote()
        try:
            if awaits:
                result = asyncio.run(awaited(one))
            else:
                result = ray.get(one.name.remote() if kind is small.Worker else one)
            while session._current.actors._waiting:
                ray.get(ray.put(time.sleep(0.05)))
        except precision_shim.PartialInstallationError as error:
            result = f"error: {error}"
        said.append([result, *told])
        precision_shim.uninstall()
    return said

package = {"PYTHONPATH": sys.argv[2]}
found.update({
    "with": start(small.Worker, small.work, strict=True),
    "off": start(small.Worker, PRECISION_SHIM="0"),
    "variable": start(small.Worker, PRECISION_SHIM=""),
    "package": start(small.Worker, small.work, **package),
    "strict": start(small.Worker, strict=True, **package),
    "slow strict": start(small.Worker, strict=True, patience=0.001, **package),
    "awaited": start(small.Worker, awaits=True, **package),
    "awaited strict": start(small.Worker, awaits=True, strict=True, **package),
})
assert [getattr(*one) for one in (*names, (ray, "get"))] == before
"""
    on = {"PRECISION_SHIM": "1", "PRECISION_SHIM_FRAMEWORKS": "small", "PYTHONPATH": str(tmp_path)}
    found = drive(body, "", f"{without}{os.pathsep}{tmp_path}", **on)
    assert (found["with"], found["off"]) == ([["an actor"], ["a task"]], [["an actor"]])
    lacking = "(PRECISION_SHIM=1, the package is not installed there; "
    ((actor, told),) = found["variable"]
    assert (actor, "(PRECISION_SHIM=unset; " in told) == ("an actor", True)
    (actor, told), (task, other) = found["package"]
    assert (actor, task) == ("an actor", "a task")
    assert ": small.Worker, which" in told
    assert lacking in told
    assert ": small.work, which" in other
    assert lacking in other
    for strict in ("strict", "slow strict", "awaited strict"):
        ((error,),) = found[strict]
        assert error.startswith("error: ")
        assert lacking in error
    ((actor, told),) = found["awaited"]
    assert (actor, lacking in told) == ("an actor", True)


@pytest.mark.skipif(not DASHBOARD, reason="needs ray[default], for the dashboard")
@pytest.mark.parametrize(
    ("ours", "command", "install", "features"),
    [
        # The job's runtime_env sets the variable; Ray refuses to set it in the driver's, too.
        pytest.param(
            {"PRECISION_SHIM": "1"}, {}, 'features=["fp16-scaling"]', ["fp16-scaling"], id="job"
        ),
        # The job's runtime_env lacks the variable; the command sets it.
        pytest.param({}, {"PRECISION_SHIM": "1"}, "", ALL, id="command"),
    ],
)
def test_ray_job_submit(cluster, tmp_path, ours, command, install, features):
    program = tmp_path / "job.py"
    program.write_text(
        DRIVER.replace("sys.argv[1]", "None")
        + (f"precision_shim.install({install})\n" if install else "")
        + "ray.init(log_to_driver=False)\n"
        + "found.update(task=task())\n"
        + 'print("FOUND", json.dumps(found))\n'
    )
    ray = str(Path(sys.executable).with_name("ray"))
    given = json.dumps({"env_vars": {"THEIRS": "job", **ours}})
    start = ["env", *(f"{k}={v}" for k, v in command.items()), sys.executable, str(program)]
    done = subprocess.run(
        [ray, "job", "submit", "--runtime-env-json", given, "--", *start],
        env=environment(RAY_ADDRESS=cluster.dashboard),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    task = found_in(done.stdout)["task"]
    assert (task["enabled"], task["features"], task["theirs"]) == (True, features, "job")
