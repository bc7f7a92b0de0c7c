"""The real demo: a few steps with verl's and Megatron-core's own code, as a user runs it."""

import importlib.util
import json

import pytest

from ..processes.commands import python

real = pytest.mark.skipif(
    importlib.util.find_spec("verl") is None or importlib.util.find_spec("megatron") is None,
    reason="verl and megatron-core are not installed in this environment",
)


def demo(folder, *arguments, **variables):
    """Run the demo as a user does; returns the ended process, and result.json if it exists."""
    words = ("demo", "--output", folder, *arguments)
    ended = python("-m", "precision_shim", *words, COLUMNS="80", **variables)
    return ended, result_in(folder)


def result_in(folder):
    file = folder / "result.json"
    return json.loads(file.read_text()) if file.exists() else None


def dtypes(result):
    """The dtypes in force by part, the same on every rank."""
    found = [
        {name: tuple(part["dtypes"]) for name, part in rank["parts"].items() if part["allocated"]}
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
def test_the_effect_is_there_and_measured(tmp_path):
    ended, result = demo(tmp_path, "--steps", "6", "--nproc", "2", "--beta2", "0.95")
    assert ended.returncode == 0, ended.stderr + ended.stdout
    assert ended.stderr == ""
    assert max(map(len, ended.stdout.replace(str(tmp_path), "").splitlines())) <= 80

    assert result["ok"]
    assert result["versions"].keys() == {"verl", "megatron-core", "torch", "Python"}
    everything_fp32 = dict.fromkeys(
        ("grad_buckets", "main_grads", "master", "exp_avg", "exp_avg_sq"), "fp32"
    )
    assert dtypes(result["without"]) == {"params": "bf16", **everything_fp32}
    assert per_parameter(result["without"]) == {18.0}
    after = dtypes(result["with"])
    assert after.pop("master") in {"int16", "fp32"}
    assert set(after.values()) == {"bf16"}
    assert per_parameter(result["with"]) <= {10.0, 12.0}

    for run in (result["without"], result["with"]):
        assert {len(rank["ranks"]) for rank in run["runs"]} == {2}
        assert f"{run['name']} the shim: seed 0, loss" in ended.stdout.replace("shim   :", "shim:")
        losses = run["runs"][0]["losses"]
        assert len(losses) == 6
        assert losses[-1] < losses[0]
    # As many seeds as the time allows, the same in both runs.
    seeds = [[one["seed"] for one in run["runs"]] for run in (result["without"], result["with"])]
    assert seeds[0] == seeds[1] == list(range(len(seeds[0])))
    first = result["without"]["runs"][0]["losses"][0], result["with"]["runs"][0]["losses"][0]
    assert first[0] == first[1]  # the losses differ only after the first update
    assert "FP32" in result["without"]["as_written"]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "with.rank1.log").exists()
