"""The command line as a whole: how it starts, and what it needs."""

import subprocess
import sys

import pytest

_HIDE = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("hidden", [["typer"], ["rich"], ["typer", "rich"]])
def test_without_the_extra_one_line_says_what_to_install(hidden):
    code = _HIDE.format(hidden=hidden) + "from precision_shim.cli import main; main()"
    ended = python(code, "--help")
    assert ended.returncode == 2
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert "pip install 'precision-shim[cli]'" in line


def test_another_missing_module_is_not_blamed_on_the_extra():
    code = _HIDE.format(hidden=["precision_shim.cli"]) + (
        "sys.meta_path[0].find_spec = lambda name, *a: (_ for _ in ()).throw("
        "ModuleNotFoundError(name=name)) if name == 'precision_shim.cli.demo' else None\n"
        "from precision_shim.cli import main; main()"
    )
    ended = python(code)
    assert ended.returncode == 1
    assert "ModuleNotFoundError" in ended.stderr
    assert "pip install" not in ended.stderr


def test_the_package_without_its_command_line_needs_no_extra():
    code = _HIDE.format(hidden=["typer", "rich"]) + "import precision_shim, precision_shim.cli"
    assert python(code).returncode == 0


def test_help_and_version_import_neither_torch_nor_a_framework():
    code = (
        "import sys\n"
        "from precision_shim.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'verl', 'megatron', 'matplotlib', 'numpy'} & {*sys.modules}\n"
        "assert not heavy, heavy"
    )
    for arguments in (["--help"], ["--version"], ["demo", "--help"], ["run", "--help"]):
        ended = python(code, *arguments)
        assert ended.returncode == 0, ended.stderr


def test_a_command_does_not_load_the_others():
    code = (
        "import sys\n"
        "from precision_shim.cli import main\n"
        "try: main()\n"
        "except SystemExit: print(*sorted(name for name in sys.modules))"
    )
    loaded = python(code, "run", "--help").stdout.split()
    assert "precision_shim.cli.run" in loaded
    assert not {"precision_shim.cli.doctor", "precision_shim.cli.demo", "wrapt"} & {*loaded}


def test_python_dash_m_is_the_same_command():
    ended = subprocess.run(
        [sys.executable, "-m", "precision_shim", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    import precision_shim

    assert ended.stdout == f"precision-shim {precision_shim.__version__}\n"
