"""The command line as a whole: its start and its dependencies."""

import os
import subprocess
import sys

import pytest

from ..processes.commands import python

_HIDE = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
"""
_MAIN = "from precision_shim_tools.cli import main; main()"
_WITHOUT_RICH = _HIDE.format(hidden=["rich"]) + _MAIN


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--help"],
        ["demo", "--help"],
        ["doctor"],
        ["doctor", "--verbose"],
        ["run", "--strict", "--", sys.executable, "-c", ""],
    ],
    ids=" ".join,
)
def test_only_the_demo_needs_more_than_the_base_install(arguments):
    ended = python("-c", _WITHOUT_RICH, *arguments)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_demo_names_what_to_install_in_one_line():
    ended = python("-c", _WITHOUT_RICH, "demo")
    assert ended.returncode == 2
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert "rich" in line
    assert "pip install 'precision-shim[demo]'" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-command"], "no-such-command"),
        (["doctor", "--no-such-option"], "--no-such-option"),
        (["doctor", "--verb"], "--verb"),  # an abbreviation may be ambiguous in a later version
        (["run"], "COMMAND"),
        (["run", "--", ""], "COMMAND"),
        (["run", "--no-such-option", "true"], "--no-such-option"),
        (["demo", "--steps", "1"], "--steps"),
        (["demo", "--nproc", "many"], "--nproc"),
    ],
)
def test_wrong_usage_is_status_2_on_stderr(arguments, message):
    ended = python("-c", _MAIN, *arguments)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--features", "fp16", "--features: unknown feature 'fp16' (did you mean fp16-scaling?)"),
        ("--frameworks", "verll", "--frameworks: unknown framework 'verll' (did you mean verl?)"),
        ("--set", "optimiser_states=auto", "--set: unknown setting 'optimiser_states' (did you"),
        ("--set", "log=loud", "--set: PRECISION_SHIM_LOG='loud' is not a valid setting"),
    ],
)
def test_a_bad_value_of_an_option_names_the_option(option, value, message):
    ended = python("-c", _MAIN, "run", option, value, "--", sys.executable, "-c", "print('ran')")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert f"precision-shim run: {message}" in ended.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--", sys.executable, "-c", "print('ran')"],
        ["plan", "--", "python", "-m", "verl.trainer.main_ppo"],
        ["checkpoint", "nowhere"],
        ["audit", "nowhere"],
        ["demo"],
        ["doctor"],
    ],
    ids=lambda one: one[0],
)
def test_every_command_objects_to_a_variable_that_there_is_not(arguments):
    environment = {"PRECISION_SHIM_OPTIMISER_STATES": "as-configured"}
    ended = python("-c", _MAIN, *arguments, **environment)
    told = " ".join((ended.stdout if arguments == ["doctor"] else ended.stderr).split())
    assert ended.returncode == (1 if arguments == ["doctor"] else 2)
    assert (
        "PRECISION_SHIM_OPTIMISER_STATES is no variable of precision_shim; did you mean "
        "PRECISION_SHIM_OPTIMIZER_STATES? Allowed: " in told
    )
    if arguments != ["doctor"]:
        assert ended.stdout == ""
        assert len(ended.stderr.splitlines()) == 1


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in which $SHIM is the command ``precision-shim``."""
    shim = f'"{sys.executable}" -m precision_shim'
    return subprocess.run(
        ["bash", "-c", line.replace("$SHIM", shim)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_run_starts_the_command_where_streams_are_closed(tmp_path, closed):
    """A daemon may close its streams before it starts a job."""
    ended = shell(f"$SHIM run -- touch {tmp_path}/ran {closed}")
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "ran").is_file()


_TELL = "import os, sys; print(sys.argv[1:], os.environ.get('PRECISION_SHIM_FEATURES'))"


@pytest.mark.parametrize(
    ("options", "features"),
    [
        (["--features", "-fp16-scaling", "--"], "dtype-coercion,bf16-dispatch"),
        (["--features=fp16-scaling"], "fp16-scaling"),
    ],
)
def test_a_value_may_begin_with_a_dash_and_the_command_keeps_its_own_options(options, features):
    theirs = ["--help", "--", "--set", "a=b", "--features", "-x"]
    ended = python("-c", _MAIN, "run", *options, sys.executable, "-c", _TELL, *theirs)
    assert ended.returncode == 0, ended.stderr
    assert str(theirs) in ended.stdout
    assert f" {features}" in ended.stdout


@pytest.mark.parametrize(
    ("words", "status", "slow"),
    [
        ("--help", 0, ""),
        ("--version", 0, ""),
        ("demo --help", 0, ""),
        ("run --help", 0, "wrapt importlib.metadata"),
        ("doctor", 0, "wrapt"),
        ("checkpoint nowhere", 2, "wrapt importlib.metadata precision_shim.seams"),
    ],
)
def test_a_command_that_needs_no_torch_imports_nothing_slow(words, status, slow):
    heavy = {"torch", "verl", "megatron", "matplotlib", "numpy", "rich", *slow.split()}
    code = (
        "import sys\n"
        "from precision_shim_tools.cli import main\n"
        "try: main()\n"
        f"except SystemExit as end: assert (end.code or 0) == {status}, end.code\n"
        f"found = {heavy} & sys.modules.keys()\n"
        "assert not found, found"
    )
    ended = python("-c", code, *words.split())
    assert ended.returncode == 0, ended.stderr
