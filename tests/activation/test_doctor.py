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
        assert not done.stderr or variables == {"PRECISION_SHIM": "maybe"}  # its start says so
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


def test_text_fits_80_columns_without_colours(doctor):
    done = doctor(PRECISION_SHIM="strict", PRECISION_SHIM_FRAMEWORKS="toy,verl", FORCE_COLOR="1")
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    for expected in (
        "toy 1.0, tested: can be patched",
        "  bf16-dispatch          would be in force\n",
        "not installed: verl\n",
        "not asked for: skyrl, nemo-rl, torchtitan, areal, ms-swift, roll, slime, miles,\n  solo\n",
    ):
        assert expected in done.stdout
    assert "toy.ops:scale" not in done.stdout


def test_verbose_shows_every_seam_and_setting(doctor):
    shown = doctor("--verbose", PRECISION_SHIM_LOG="quiet").stdout
    for expected in (
        "to wrap  toy.ops:scale",
        "why: to be seen",
        "log=quiet  (variable)",
        "growth_interval=400  (default)",
    ):
        assert expected in shown
    assert max(map(len, shown.splitlines())) <= 80


MANY = {
    "toy_shim.py": """
from precision_shim.adapting import Adapter, Seam


def negate(call):
    return -call.proceed()


ADAPTER = Adapter(
    framework="toy",
    distribution="toy",
    packages=("toy",),
    tested=("1.0",),
    paths={"x": "X engine", "y": "Y engine"},
    seams=tuple(
        Seam(f"toy.ops:gone{i}", feature, negate, why="to be seen", group=group)
        for feature in ("dtype-coercion", "bf16-dispatch", "fp16-scaling")
        for group in ("x", "y")
        for i in range(12)
    ),
)
""",
}


def test_what_is_refused_everywhere_for_the_same_reasons_fits_a_screen(
    doctor, write_files, tmp_path
):
    write_files(tmp_path, MANY)
    shown = doctor(PYTHONPATH=str(tmp_path)).stdout
    assert len(shown.splitlines()) <= 40
    assert shown.count("toy.ops:gone0 not found") == 1
    assert "--verbose" in shown  # the output cuts the long problem and names --verbose
    whole = doctor("--verbose", PYTHONPATH=str(tmp_path)).stdout
    problems = " ".join(whole[whole.index("\nproblems") :].split())
    assert problems.count("toy.ops:gone11 not found") == 1
    assert "PRECISION_SHIM_FEATURES=-dtype-coercion,-bf16-dispatch,-fp16-scaling" in problems


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"PRECISION_SHIM": "maybe"}, "PRECISION_SHIM='maybe'"),
        ({"PRECISION_SHIM_LOG": "loud"}, "PRECISION_SHIM_LOG"),
        ({"PRECISION_SHIM_FEATURE": "bf16-dispatch"}, "did you mean PRECISION_SHIM_FEATURES?"),
        ({"PRECISION_SHIM_FRAMEWORKS": "verl"}, "verl, which is not installed"),
    ],
)
def test_what_is_asked_for_and_cannot_be(found, variables, problem):
    told = found(**variables)
    assert not told["ok"]
    assert any(problem in one for one in told["problems"])


@pytest.mark.parametrize(
    "variables",
    [
        {"PRECISION_SHIM_FEATURES": "bf16"},
        {"PRECISION_SHIM_FRAMEWORKS": "toyy"},
        {"PRECISION_SHIM_FEATURE": "bf16-dispatch"},
    ],
    ids=lambda one: "=".join(*one.items()),
)
def test_with_a_setting_that_is_not_valid_nothing_would_be_patched(found, doctor, variables):
    told = found(**variables)
    assert told["frameworks"]["toy"]["state"] == "refused"
    assert (told["frameworks"]["toy"]["seams"], told["features"], told["settings"]) == ([], [], {})
    text = doctor(**variables).stdout
    assert "toy 1.0: would not be patched, because a setting is not valid\n" in text
    assert "in force" not in text


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
