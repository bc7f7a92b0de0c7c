"""Fixtures: a fresh virtual environment with the built wheel, and toy packages as frameworks.

These tests check which processes the shim reaches, not what it does to a framework. A toy package
with its own adapter shows in milliseconds whether the shim reaches a process. ``test_ray.py`` and
``test_verl.py`` use real Ray and real verl.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

TOY = {
    "toy/__init__.py": "",
    "toy/ops.py": "def scale(value):\n    return 2 * value\n",
    "toy/train.py": """
class Optimizer:
    def __init__(self, lr=1.0):
        self.lr = lr
""",
    "toy_shim.py": """
from precision_shim.adapting import Adapter, collect, seam


@seam("toy.ops:scale", "bf16-dispatch", why="to be seen")
def negate(call):
    return -call.proceed()


ADAPTER = Adapter(
    framework="toy",
    distribution="toy",
    packages=("toy",),
    tested=("1.0",),
    effects=("toy.train:Optimizer.__init__",),
    seams=collect(negate),
)
""",
    "toy-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n",
    "toy-1.0.dist-info/entry_points.txt": "[precision_shim.adapters]\ntoy = toy_shim:ADAPTER\n",
    # A framework of one module: the seam's target is the package whose import loads the adapter.
    "solo.py": "def scale(value):\n    return 2 * value\n",
    "solo_shim.py": """
from precision_shim.adapting import Adapter, Seam
from toy_shim import negate

ADAPTER = Adapter(
    framework="solo",
    distribution="solo",
    packages=("solo",),
    tested=("1.0",),
    seams=(Seam("solo:scale", "bf16-dispatch", negate, why="to be seen"),),
)
""",
    "solo-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: solo\nVersion: 1.0\n",
    "solo-1.0.dist-info/entry_points.txt": "[precision_shim.adapters]\nsolo = solo_shim:ADAPTER\n",
    "report_toy.py": """
from toy import ops

if __name__ == "__main__":
    print("patched" if ops.scale(1) == -2 else "not patched")
""",
}
"""Files that the fixtures write into the environment's site-packages, beside the wheel."""


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


class Environment:
    """A virtual environment, with methods that run commands in it."""

    def __init__(self, folder: Path) -> None:
        self.python = str(folder / "bin" / "python")
        self.scripts = folder / "bin"
        self.site = next(folder.glob("lib/python*/site-packages"))

    def run(self, *arguments, check=True, cwd=None, **variables):
        """Run the environment's Python with ``variables`` and no other variable of the shim."""
        return self.execute(self.python, *arguments, check=check, cwd=cwd, **variables)

    def execute(self, *command, check=True, cwd=None, **variables):
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PRECISION_SHIM", "PYTHON", "VIRTUAL_ENV", "COV_"))
        }
        done = subprocess.run(
            command,
            env={**inherited, "PYTHONDONTWRITEBYTECODE": "1", **variables},
            cwd=cwd or self.site.parent,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if check and done.returncode:
            pytest.fail(f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done


def make_environment(folder: Path, *what: str) -> Environment:
    """Create a virtual environment with this Python and install packages, by uv or by venv and pip.

    wrapt and packaging are installed in the versions that this environment has.
    """
    same = []
    for name in ("wrapt", "packaging"):
        with contextlib.suppress(PackageNotFoundError):
            same.append(f"{name}=={version(name)}")
    if shutil.which("uv"):
        # Pass the base Python's path, because uv may resolve a bare name to one of pyenv's shims.
        subprocess.run(["uv", "venv", "-q", "-p", _base_python(), str(folder)], check=True)
        install = ["uv", "pip", "install", "-q", "-p", str(folder / "bin" / "python")]
        if "-e" not in what:  # as pip does; the editable install has the start-up without bytecode
            install.append("--compile-bytecode")
    else:
        subprocess.run([_base_python(), "-m", "venv", str(folder)], check=True)
        install = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q"]
    subprocess.run([*install, *what, *same], check=True)
    return Environment(folder)


def _base_python() -> str:
    return getattr(sys, "_base_executable", None) or sys.executable


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    if shutil.which("uv"):
        build = ["uv", "build", "-q", "--wheel", "--out-dir", str(out), str(ROOT)]
    else:
        build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(out), str(ROOT)]
    subprocess.run(build, check=True)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="session")
def environment(wheel, tmp_path_factory) -> Environment:
    """A virtual environment with the wheel and the toy packages."""
    made = make_environment(tmp_path_factory.mktemp("environment") / "venv", str(wheel))
    write(made.site, TOY)
    return made


@pytest.fixture(scope="session")
def editable(tmp_path_factory) -> Environment:
    """A virtual environment with an editable install and the toy packages."""
    made = make_environment(tmp_path_factory.mktemp("editable") / "venv", "-e", str(ROOT))
    write(made.site, TOY)
    return made


ON = {"PRECISION_SHIM": "1", "PRECISION_SHIM_FRAMEWORKS": "toy,solo"}
"""Switch the shim on and name the toys, so that importing a toy loads its adapter without torch."""


@pytest.fixture
def on():
    return dict(ON)


@pytest.fixture
def write_files():
    return write
