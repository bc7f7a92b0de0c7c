"""The real demo: a few steps with verl's and Megatron-core's own code.

One run starts its processes as a user's run does, with two ranks. The other runs fork their
processes from one that has imported verl's dependencies (``demo_processes.py``). Forking takes a
fifth of the time.
"""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

from ..rank_server import rank_server

real = pytest.mark.skipif(
    importlib.util.find_spec("verl") is None or importlib.util.find_spec("megatron") is None,
    reason="verl and megatron-core are not installed in this environment",
)
SHORT = ("--steps", "6", "--seeds", "1")


@dataclass
class Ended:
    """Exit status and output of a run of the demo."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Forks runs of the demo."""
    with rank_server("tests.cli.demo_processes", tmp_path_factory.mktemp("demos")) as runs:
        yield runs


@pytest.fixture
def demo(server, tmp_path_factory):
    """Return a function that runs the demo in forks and returns its end and result.json."""

    def run(folder, *arguments, **variables):
        place = tmp_path_factory.mktemp("demo")
        given = ["--output", str(folder), *arguments]
        variables = {"COLUMNS": "80", **variables}
        (code,) = server("demo", folder=place, world=1, arguments=given, variables=variables)
        texts = ((place / name).read_text() for name in ("stdout", "stderr"))
        return Ended(code, *texts), result_in(folder)

    return run


@pytest.fixture
def demo_of(demo):
    """Two ranks run in new processes; any other number runs in forks."""
    return lambda nproc: demo_by_itself if nproc == 2 else demo


def demo_by_itself(folder, *arguments, **variables):
    """Run the demo as a user does; returns the ended process, and result.json if it exists."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PRECISION_SHIM")}
    ended = subprocess.run(
        [sys.executable, "-m", "precision_shim", "demo", "--output", str(folder), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**environment, "COLUMNS": "80", **variables},
    )
    return ended, result_in(folder)


def result_in(folder):
    file = folder / "result.json"
    return json.loads(file.read_text()) if file.exists() else None


def dtypes(result):
    """The dtypes in force by part, the same on every rank."""
    found = [
        {name: tuple(part["dtypes"]) for name, part in rank["parts"].items() if part["nbytes"]}
        | {"main_grads": tuple(rank["main_grads"])}
        for run in result["runs"]
        for rank in run["ranks"]
    ]
    assert all(one == found[0] for one in found)
    found[0].pop("other", None)
    return {name: "+".join(value) for name, value in found[0].items()}


def per_parameter(result):
    return {rank["per_parameter"] for run in result["runs"] for rank in run["ranks"]}


@real
@pytest.mark.parametrize(("nproc", "beta2"), [(1, 0.999), (2, 0.95)])
def test_the_effect_is_there_and_measured(tmp_path, demo_of, nproc, beta2):
    arguments = ("--nproc", str(nproc), "--beta2", str(beta2))
    ended, result = demo_of(nproc)(tmp_path, *SHORT, *arguments)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    assert ended.stderr == ""
    assert max(map(len, ended.stdout.replace(str(tmp_path), "").splitlines())) <= 80

    assert result["ok"]
    assert result["versions"].keys() == {"verl", "megatron-core", "torch", "Python"}
    everything_fp32 = dict.fromkeys(
        ("grad_buckets", "main_grads", "master", "exp_avg", "exp_avg_sq"), "float32"
    )
    assert dtypes(result["without"]) == {"params": "bfloat16", **everything_fp32}
    assert per_parameter(result["without"]) == {18.0}
    after = dtypes(result["with"])
    assert after.pop("master") in {"int16", "float32"}
    # At Megatron's default beta2 a bf16 second moment could not decay, so auto keeps it in fp32.
    states = result["with"]["shim"]["settings"]["optimizer_states"]
    guarded = beta2 == 0.999 and states == "auto"
    assert after.pop("exp_avg_sq") == ("float32" if guarded else "bfloat16")
    assert set(after.values()) == {"bfloat16"}
    assert per_parameter(result["with"]) <= ({12.0, 14.0} if guarded else {10.0, 12.0})

    for run in (result["without"], result["with"]):
        assert [len(rank["ranks"]) for rank in run["runs"]] == [nproc]
        losses = run["runs"][0]["losses"]
        assert len(losses) == 6
        assert losses[-1] < losses[0]
    first = result["without"]["runs"][0]["losses"][0], result["with"]["runs"][0]["losses"][0]
    assert first[0] == first[1]  # the losses differ only after the first update
    assert "FP32" in result["without"]["as_written"]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / f"with.rank{nproc - 1}.log").exists()


@real
@pytest.mark.parametrize("value", ["0", "no"])
def test_exit_status_1_where_the_effect_is_not_there(tmp_path, demo, value):
    ended, result = demo(tmp_path, *SHORT, PRECISION_SHIM=value)
    assert ended.returncode == 1
    assert not result["ok"]
    assert dtypes(result["with"]) == dtypes(result["without"])
    assert per_parameter(result["with"]) == {18.0}
    (line,) = ended.stderr.splitlines()
    assert f"PRECISION_SHIM={value}" in line
    assert "18 B/param measured, promised 10 or 12" in line
    assert f"PRECISION_SHIM={value} is set: install() does nothing" in ended.stdout


@real
@pytest.mark.parametrize("way", ["variable", "option"])
def test_as_configured_promises_what_the_config_asks_for(tmp_path, demo, way):
    by_variable = {"PRECISION_SHIM_OPTIMIZER_STATES": "as-configured"}
    ended, result = (
        demo(tmp_path, *SHORT, **by_variable)
        if way == "variable"
        else demo(tmp_path, *SHORT, "--set", "optimizer_states=as-configured")
    )
    assert ended.returncode == 0, ended.stderr + ended.stdout
    assert result["with"]["shim"]["settings"]["optimizer_states"] == "as-configured"
    found = dtypes(result["with"])
    assert (found["exp_avg"], found["exp_avg_sq"]) == ("bfloat16", "float32")


@real
def test_a_run_that_ends_badly_is_shown_with_the_end_of_its_log(tmp_path, demo):
    settings = tmp_path / "optim.yaml"
    settings.write_text("lr: 1e-3\noverride_optimizer_config: {exp_avg_dtype: bf61}\n")
    ended, result = demo(tmp_path / "out", *SHORT, "--config", str(settings))
    assert ended.returncode == 1
    assert result is None
    assert "the run with the shim ended with status 1" in ended.stderr
    assert "bf61" in ended.stderr


@real
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--beta2", "1.5"], "--beta2 1.5"),
        (["--config", "no-such-file.yaml"], "no-such-file.yaml"),
        (["--text", "no-such-file.txt"], "no-such-file.txt"),
        (["--set", "optimizer_states=sometimes"], "PRECISION_SHIM_OPTIMIZER_STATES='sometimes'"),
        (["--set", "no_such_setting=1"], "no_such_setting"),
    ],
)
def test_exit_status_2_for_what_cannot_be_used(tmp_path, demo, arguments, message):
    ended, result = demo(tmp_path, *arguments)
    assert ended.returncode == 2
    assert result is None
    (line,) = ended.stderr.splitlines()
    assert message in line


def test_without_verl_one_message_says_how_to_get_it(tmp_path):
    code = (
        "import sys; sys.modules['verl'] = None; sys.modules['megatron'] = None\n"
        "from precision_shim.cli import main; main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, "demo", "--output", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "verl, megatron-core" in line
    assert "tox run -e demo" in line
    assert not (tmp_path / "out").exists()
