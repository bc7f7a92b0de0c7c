"""Check the built packages, and install them into an environment without other packages.

The argument is the directory that contains one wheel and one source package.
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
START_UP = {path.name for path in ROOT.glob("shim/*.pth")} | {
    p.name for p in ROOT.glob("shim/*.start")
}
SOURCES = {
    path.relative_to(root).as_posix()
    for root in (ROOT / "shim", ROOT / "adapters", ROOT / "tools")
    for path in root.rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
} | {"precision_shim/_version.py"}
IDLE = """
import sys
assert not [name for name in sys.modules if name.startswith(("precision_shim", "wrapt", "torch"))]
import precision_shim, precision_shim_adapters
assert not {"torch", "verl"} & sys.modules.keys()
assert not precision_shim.status().enabled
"""
STARTED = "from precision_shim.process import standby; assert standby.waiting(), 'it is dead'"

ALONE = """
import re
from importlib.metadata import distributions
names = {re.sub("[-_.]+", "-", one.metadata["Name"]).lower() for one in distributions()}
assert names == {"precision-shim", "wrapt", "packaging"}, f"not alone: {sorted(names)}"
"""
RUN = "import os; assert os.environ['PRECISION_SHIM'] == 'strict', os.environ"


def check_contents(wheel: Path, source: Path) -> None:
    """The wheel contains every file of the three source roots, the licence, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        about = {name for name in held if name.split("/")[0].endswith(".dist-info")}
        (metadata,) = (name for name in about if name.endswith("/METADATA"))
        description = archive.read(metadata).decode()
    missing, foreign = SOURCES - held, held - about - SOURCES
    assert not missing, f"not in the wheel: {sorted(missing)}"
    assert not foreign, f"does not belong into the wheel: {sorted(foreign)}"
    assert {path.rsplit(".")[-1] for path in START_UP} == {"pth", "start"}, START_UP
    assert "precision_shim/py.typed" in held
    assert any(name.endswith("licenses/LICENSE") for name in about), "no licence in the wheel"
    assert "# precision_shim\n" in description, "no description in the wheel"
    dead = re.findall(r"\]\((?!https?:)[^)]*\)", description)
    assert not dead, f"links of the description that lead nowhere from an index: {dead}"
    with tarfile.open(source) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"LICENSE", "README.md", "pyproject.toml", "tox.ini", "toxfile.py"}
    assert wanted <= packed, f"not in the source package: {sorted(wanted - packed)}"


def check_install(*what: str) -> None:
    """An installed package imports, starts only if switched on, and has a command."""
    with tempfile.TemporaryDirectory() as scratch:
        env = {k: v for k, v in os.environ.items() if not k.startswith("PRECISION_SHIM")}
        env["VIRTUAL_ENV"] = scratch

        def run(*command: str, status: int = 0, **variables: str) -> None:
            print("$", *command, flush=True)
            ended = subprocess.run(command, check=False, cwd=scratch, env={**env, **variables})
            assert ended.returncode == status, f"ended with {ended.returncode}, not {status}"

        python, command = f"{scratch}/bin/python", f"{scratch}/bin/precision-shim"
        run("uv", "venv", "--quiet", "--allow-existing", "--python", sys.executable, scratch)
        run("uv", "pip", "install", "--quiet", *what)
        run(python, "-c", IDLE)
        run(python, "-c", STARTED, PRECISION_SHIM="1")
        check_command(run, python, command)
        run("uv", "pip", "install", "--quiet", *what[:-1], f"{what[-1]}[cli]")
        run(command, "--help")
        run("uv", "pip", "uninstall", "--quiet", "precision-shim")
        left = [path for path in Path(scratch).rglob("*precision_shim*") if path.suffix != ".pyc"]
        assert not left, f"uninstalling leaves {left}"


def check_command(run: Callable[..., None], python: str, command: str) -> None:
    """The command line works on the base install; only the demo needs more packages."""
    run(python, "-c", ALONE)
    run(command)
    run(python, "-m", "precision_shim", "--help")
    run(command, "doctor")
    run(command, "doctor", PRECISION_SHIM="1", status=1)  # fails: nothing to patch here
    run(command, "run", "--strict", "--", python, "-c", RUN)
    run(command, "run", "--", "sh", "-c", "exit 7", status=7)
    run(command, "run", status=2)
    run(command, "audit", "nowhere", status=2)
    run(command, "demo", status=2)


def main(dist: Path) -> None:
    """Check the one wheel and the one source package in ``dist``."""
    (wheel,), (source,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    check_contents(wheel, source)
    check_install(str(wheel))
    check_install("--editable", str(ROOT))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
