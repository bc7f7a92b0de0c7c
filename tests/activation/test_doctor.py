"""Tests of ``precision-shim doctor``: its report and its exit status."""

from __future__ import annotations

import json

import pytest

from precision_shim.process.settings import TABLE

REFUSED = {"toy/__init__.py": "", "toy/ops.py": "", "toy/train.py": ""}


@pytest.fixture
def doctor(environment):
    def run(*arguments, **variables):
        command = ("-m", "precision_shim", "doctor", *arguments)
        return environment.run(*command, check=False, **variables)

    return run


@pytest.fixture
def found(doctor):
    def run(**variables):
        done = doctor("--json", **variables)
        told = json.loads(done.stdout)
        assert done.returncode == (0 if told["ok"] else 1)
        assert "Traceback" not in done.stderr
        return told

    return run


def test_a_sound_environment(found, environment):
    told = found(PRECISION_SHIM="1", PRECISION_SHIM_GRAD_BUCKET="align")
    assert told["ok"]
    assert told["problems"] == []
    assert told["python"]["executable"] == environment.python
    assert told["start_up"]["active"]
    assert told["start_up"]["files"] == [str(environment.site / "zz_precision_shim.pth")]
    assert told["packages"]["wrapt"]["c_extension"] in (True, False)
    assert told["packages"]["transformer-engine"] == {"version": None}
    assert told["variables"] == {"PRECISION_SHIM": "1", "PRECISION_SHIM_GRAD_BUCKET": "align"}
    assert told["settings"]["grad_bucket"] == {"value": "align", "from": "variable"}
    assert told["settings"]["log"] == {"value": "info", "from": "default"}
    assert set(told["settings"]) == set(TABLE)
    toy = told["frameworks"]["toy"]
    assert (toy["version"], toy["tested"], toy["state"]) == ("1.0", True, "pending")
    assert toy["seams"] == [
        {"target": "toy.ops:scale", "feature": "bf16-dispatch", "state": "pending", "reason": ""}
    ]
    assert told["frameworks"]["verl"]["state"] == "absent"


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"PRECISION_SHIM": "maybe"}, "PRECISION_SHIM='maybe'"),
        ({"PRECISION_SHIM_FEATURE": "bf16-dispatch"}, "did you mean PRECISION_SHIM_FEATURES?"),
        ({"PRECISION_SHIM_FRAMEWORKS": "verl"}, "verl, which is not installed"),
        ({"PRECISION_SHM": "1"}, "PRECISION_SHM is no variable of precision_shim: write PRECISION"),
    ],
)
def test_what_is_asked_for_and_cannot_be(found, variables, problem):
    told = found(**variables)
    assert not told["ok"]
    assert any(problem in one for one in told["problems"])


def test_with_a_setting_that_is_not_valid_nothing_would_be_patched(found, doctor):
    variables = {"PRECISION_SHIM_FEATURES": "bf16"}
    told = found(**variables)
    assert told["frameworks"]["toy"]["state"] == "refused"
    assert (told["frameworks"]["toy"]["seams"], told["features"], told["settings"]) == ([], [], {})
    text = doctor(**variables).stdout
    assert "toy 1.0: would not be patched, because a setting is not valid\n" in text
    assert "in force" not in text


@pytest.mark.parametrize(
    ("variables", "verdict"),
    [
        ({"PRECISION_SHIM": "1"}, "ON: toy 1.0, solo 1.0"),
        ({"PRECISION_SHIM": "1", "PRECISION_SHIM_FRAMEWORKS": "solo"}, "ON: solo 1.0"),
        ({"PRECISION_SHIM": "0"}, "OFF in this environment: export PRECISION_SHIM=1"),
        ({}, "OFF in this environment: export PRECISION_SHIM=1"),
        ({"PRECISION_SHIM": "1", "PRECISION_SHIM_FRAMEWORKS": "toy,verl"}, "ON, with the problems"),
        ({"PRECISION_SHIM": "maybe"}, "OFF in this environment: correct the setting"),
    ],
)
def test_the_last_line_is_the_verdict(doctor, variables, verdict):
    lines = doctor(**variables).stdout.splitlines()
    assert lines[-1].startswith(verdict)
    assert not [line for line in lines if "would be in force" in line]


def test_a_seam_that_does_not_hold(found, doctor, write_files, tmp_path):
    write_files(tmp_path, REFUSED)
    told = found(PYTHONPATH=str(tmp_path))
    assert told["frameworks"]["toy"]["state"] == "refused"
    assert "toy.ops:scale not found" in told["frameworks"]["toy"]["seams"][0]["reason"]
    assert "toy.ops:scale not found" in doctor(PYTHONPATH=str(tmp_path)).stdout
    assert found(PYTHONPATH=str(tmp_path), PRECISION_SHIM_FEATURES="-bf16-dispatch")["ok"]
    assert found(PYTHONPATH=str(tmp_path), PRECISION_SHIM="0")["ok"]


def test_an_inactive_start_up_file(environment):
    command = ("-S", "-m", "precision_shim", "doctor", "--json")
    for variables, ok in (({}, True), ({"PRECISION_SHIM": "1"}, False)):
        done = environment.run(*command, check=False, PYTHONPATH=str(environment.site), **variables)
        told = json.loads(done.stdout)
        assert not told["start_up"]["active"]
        assert told["ok"] is ok
        assert done.returncode == (0 if ok else 1)
