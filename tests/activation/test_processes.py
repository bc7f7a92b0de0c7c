"""All ways to start a process, and whether the shim patches the new process.

``test_ray.py`` tests Ray's workers, and ``test_verl.py`` tests torchrun with real verl.
"""

from __future__ import annotations

import os

import pytest

from .conftest import TOY

NOT = "not patched"
YES = "patched"

CHILDREN = {
    "subprocess": """
import subprocess, sys
print(subprocess.run([sys.executable, "-m", "report_toy"], capture_output=True, text=True).stdout)
""",
    "os.exec": """
import os, sys
os.execv(sys.executable, [sys.executable, "-m", "report_toy"])
""",
    **{
        method: f"""
import multiprocessing

def report(queue):
    from toy import ops
    queue.put("{YES}" if ops.scale(1) == -2 else "{NOT}")

if __name__ == "__main__":
    context = multiprocessing.get_context("{method}")
    queue = context.SimpleQueue()
    child = context.Process(target=report, args=(queue,))
    child.start()
    print(queue.get())
    child.join()
"""
        for method in ("spawn", "fork", "forkserver")
    },
    "spawn, ProcessPoolExecutor": """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from toy import ops

if __name__ == "__main__":
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        # By reference, also where the parent's is wrapped: the child takes its own.
        print("patched" if pool.submit(ops.scale, 1).result() == -2 else "not patched")
""",
}
"""Maps each start method to a program whose child prints whether it is patched."""


@pytest.mark.parametrize("how", CHILDREN)
def test_children_with_the_variable(environment, on, how, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(CHILDREN[how])
    assert environment.run(str(program), **on).stdout.split("\n")[0] == YES


@pytest.mark.parametrize("how", ["forkserver", "spawn, ProcessPoolExecutor"])
def test_children_of_an_explicit_install(environment, how, tmp_path):
    program = tmp_path / "program.py"
    install = "import precision_shim; precision_shim.install(frameworks=['toy'])\n"
    program.write_text(install + CHILDREN[how])
    assert environment.run(str(program)).stdout.split("\n")[0] == YES


@pytest.mark.parametrize("how", ["subprocess", "fork"])
def test_children_of_an_install_that_is_not_exported(environment, how, tmp_path):
    program = tmp_path / "program.py"
    install = """
import precision_shim
if __name__ == "__main__":  # a spawned child imports this file again
    precision_shim.install(frameworks=['toy'], export=False)
"""
    program.write_text(install + CHILDREN[how])
    # A forked child is a copy of its parent, including the patches.
    assert environment.run(str(program)).stdout.split("\n")[0] == (YES if how == "fork" else NOT)


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("-I", YES),  # isolated from PYTHON* variables and the user's site alone
        ("-S", NOT),  # no start-up file is read: precision_shim.autoinstall
    ],
)
def test_flags_of_the_interpreter(environment, on, flag, expected):
    # -S also removes site-packages from sys.path; a program that needs packages adds it again.
    code = f"import sys; sys.path.append({str(environment.site)!r})\n" + TOY["report_toy.py"]
    done = environment.run(flag, "-c", code, **on)
    assert (done.stdout.strip(), done.stderr) == (expected, "")


def test_without_start_up_files_autoinstall(environment, on):
    """With ``python -S``, a framework's plug-in can import ``precision_shim.autoinstall``."""
    code = f"""
import sys, os
sys.path.append({str(environment.site)!r})
import precision_shim.autoinstall
print(os.environ.get("PRECISION_SHIM"))
""" + TOY["report_toy.py"]
    for variables, switch, expected in (
        (on, "1", YES),
        ({}, "1", YES),
        ({"PRECISION_SHIM": "0"}, "0", NOT),
    ):
        done = environment.run("-S", "-c", code, **variables)
        assert done.stdout.split("\n")[:2] == [switch, expected]
    for variables in ({"PRECISION_SHIM": "maybe"}, {"PRECISION_SHIM_LOG": "loud"}):
        done = environment.run("-S", "-c", code, **variables)
        assert done.stdout.split("\n")[1] == NOT
        assert len(done.stderr.splitlines()) == 1


# -- precision-shim run -----------------------------------------------------------------------


def test_run_becomes_the_command(environment):
    shim = environment.scripts / "precision-shim"
    code = "import os, sys; print(os.getpid()); sys.exit(7)"
    done = environment.execute(
        "sh",
        "-c",
        'echo $$; exec "$0" "$@"',
        shim,
        "run",
        "--frameworks=toy",
        "--",
        environment.python,
        "-c",
        code,
        check=False,
    )
    mine, its = done.stdout.split()
    assert (mine, done.returncode) == (its, 7)
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    done = environment.execute(shim, "run", "--", environment.python, "-c", kill, check=False)
    assert done.returncode == -15


def test_run_patches_the_command_and_its_children(environment, tmp_path):
    program = tmp_path / "program.py"
    for how in ("subprocess", "spawn"):
        program.write_text(CHILDREN[how])
        done = environment.execute(
            environment.scripts / "precision-shim",
            "run",
            "--frameworks",
            "toy",
            "--",
            environment.python,
            str(program),
        )
        assert done.stdout.split("\n")[0] == YES


def test_run_sets_the_variables(environment):
    code = "import os; print({k: v for k, v in os.environ.items() if 'PRECISION_SHIM' in k})"
    done = environment.execute(
        environment.python,
        "-m",
        "precision_shim",
        "run",
        "--features=-fp16-scaling",
        "--strict",
        "--set",
        "growth-interval=7",
        environment.python,
        "-c",
        code,
    )
    assert dict(sorted(eval(done.stdout).items())) == {
        "PRECISION_SHIM": "strict",
        "PRECISION_SHIM_FEATURES": "dtype-coercion,bf16-dispatch,grad-bucket-alignment,"
        "rollout-agreement,audit",
        "PRECISION_SHIM_GROWTH_INTERVAL": "7",
    }


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--features=nosuch", "--", "true"], 2, "nosuch"),
        (["--set", "log=loud", "--", "true"], 2, "PRECISION_SHIM_LOG"),
        (["--", "no-such-command"], 127, "no-such-command"),
        (["--", os.devnull], 126, os.devnull),
    ],
)
def test_run_says_what_is_wrong(environment, arguments, status, said):
    shim = environment.scripts / "precision-shim"
    done = environment.execute(shim, "run", *arguments, check=False)
    assert done.returncode == status
    assert said in done.stderr


def test_run_respects_the_kill_switch(environment):
    shim = environment.scripts / "precision-shim"
    command = (environment.python, "-m", "report_toy")
    done = environment.execute(shim, "run", "--", *command, PRECISION_SHIM="0")
    assert done.stdout == f"{NOT}\n"
    assert "PRECISION_SHIM=0" in done.stderr
