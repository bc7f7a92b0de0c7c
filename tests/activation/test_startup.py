"""The start-up files: on, off, executed twice, with bad values, and what they import."""

from __future__ import annotations

import ast
import json

import pytest

from precision_shim.process import names as _names
from precision_shim.process import registry as _registry
from precision_shim.process import settings as _settings
from precision_shim.process import standby
from precision_shim.process import startup as _startup

from .conftest import ROOT

LIST_MODULES = "import sys, json; print(json.dumps(sorted(sys.modules)))"
PATCHED = "from toy import ops; print(ops.scale(1))"
BAD = {
    "PRECISION_SHIM_FEATURES": "bf16-dispach",
    "PRECISION_SHIM_FRAMEWORKS": "toy,nosuch",
    "PRECISION_SHIM_LOG": "loud",
}


def modules(environment, *flags, **variables):
    return set(json.loads(environment.run(*flags, "-c", LIST_MODULES, **variables).stdout))


# -- the files --------------------------------------------------------------------------------


def test_one_line_and_the_same_name():
    line = (ROOT / "shim/zz_precision_shim.pth").read_text()
    assert line.count("\n") == 1
    assert line.startswith("import os, sys; ")
    entry = (ROOT / "shim/zz_precision_shim.start").read_text().splitlines()[-1]
    assert entry == f"{_startup.__name__}:{_startup.init.__name__}"


def test_the_line_and_the_settings_agree_on_off():
    line = (ROOT / "shim/zz_precision_shim.pth").read_text()
    off = line[line.index("not in (") + len("not in ") : line.index(" and exec(")]
    assert ast.literal_eval(off) == ("", *_names.OFF)
    assert {_settings.switch({"PRECISION_SHIM": word}) for word in _names.OFF} == {"off"}
    assert {_settings.switch({"PRECISION_SHIM": word}) for word in _names.ON} == {"on"}


WANTED = {"torch", "ray", *_registry.packages()}


def test_the_start_up_file_has_the_packages_that_the_frameworks_declare():
    source = (ROOT / "shim/zz_precision_shim.py").read_text(encoding="utf-8")
    [words] = [one for one in ast.walk(ast.parse(source)) if isinstance(one, ast.Set)]
    assert ast.literal_eval(words) == WANTED


def test_the_finder_waits_for_what_the_frameworks_declare(environment, editable):
    code = "import sys; print(sorted(sys.meta_path[0].names))"
    for made in (environment, editable):
        names = made.run("-c", code, PRECISION_SHIM="1", PRECISION_SHIM_FRAMEWORKS="Their-Own, x")
        found = set(ast.literal_eval(names.stdout))
        assert found == WANTED | {"their_own", "x"}


# -- on and off -------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, "", " Off "])
def test_off_imports_nothing(environment, value):
    variables = {} if value is None else {"PRECISION_SHIM": value}
    loaded = modules(environment, **variables)
    assert not {name for name in loaded if name.startswith("precision_shim")}
    assert environment.run("-c", PATCHED, **variables).stdout == "2\n"


@pytest.mark.parametrize("install", ["environment", "editable"])
def test_on_imports_nothing_either(install, request, write_files, tmp_path):
    """With the switch on, importing a package that is no framework does not load the shim."""
    write_files(tmp_path, {"some_package.py": ""})
    made = request.getfixturevalue(install)
    code = """
import json, sys
finders = [getattr(one, "__name__", type(one).__name__) for one in sys.meta_path]
import some_package
print(json.dumps([sorted(sys.modules), finders]))
"""
    path = {"PYTHONPATH": str(tmp_path)}
    modules, finders = json.loads(made.run("-c", code, **path).stdout)
    on, found = json.loads(made.run("-c", code, PRECISION_SHIM="strict", **path).stdout)
    assert set(on) - set(modules) <= {"zz_precision_shim"}  # where there is bytecode
    assert found == [standby.FIRST, *finders]


@pytest.mark.parametrize("install", ["environment", "editable"])
def test_on_with_torch_imports_itself_and_no_more(install, request, write_files, tmp_path):
    write_files(tmp_path, {"torch.py": ""})
    made = request.getfixturevalue(install)
    for path in made.site.glob("*/entry_points.txt"):
        if "precision_shim.adapters" in path.read_text():
            path.rename(path.with_suffix(".away"))
    code = f"import importlib.metadata, torch; {LIST_MODULES}"
    variables = {"PYTHONPATH": str(tmp_path)}
    try:
        off = json.loads(made.run("-c", code, **variables).stdout)
        on = json.loads(made.run("-c", code, PRECISION_SHIM="1", **variables).stdout)
    finally:
        for path in made.site.glob("*/entry_points.away"):
            path.rename(path.with_suffix(".txt"))
    more = set(on) - set(off)
    assert more - {"zz_precision_shim"} == {  # where there is bytecode
        "precision_shim",
        "precision_shim._lazy",
        "precision_shim.process",
        "precision_shim.process.finders",
        "precision_shim.process.forks",
        "precision_shim.process.framework",
        "precision_shim.process.names",
        "precision_shim.process.registry",
        "precision_shim.process.standby",
        "precision_shim.process.startup",
        "precision_shim_adapters",
        "precision_shim_adapters.frameworks",
    }


def test_a_process_that_cannot_import_the_package_goes_on(environment, on, write_files, tmp_path):
    """While a tool such as pex replaces ``sys.path``, the process goes on without the shim."""
    write_files(tmp_path, {"torch.py": "FOUND = True\n", "toy.py": ""})
    code = "import sys; sys.path[:] = [one for one in sys.path if 'site-packages' not in one]; "
    code += "import torch, toy; print(torch.FOUND)"
    code = (
        f"import sys; before = list(sys.path); {code}; sys.path[:] = before; del sys.modules['toy']"
    )
    code += f"; sys.path.pop(1); {PATCHED}"
    done = environment.run("-c", code, PYTHONPATH=str(tmp_path), **on)
    assert (done.stdout, done.stderr) == ("True\n-2\n", "")


@pytest.mark.parametrize("install", ["environment", "editable"])
def test_patches_in_a_wheel_and_in_an_editable_install(install, on, request):
    done = request.getfixturevalue(install).run("-c", PATCHED, **on)
    assert (done.stdout, done.stderr) == ("-2\n", "")


def test_the_package_that_wakes_the_adapter_may_be_the_target(environment, on):
    done = environment.run("-c", "import solo; print(solo.scale(1))", **on)
    assert (done.stdout, done.stderr) == ("-2\n", "")


def test_start_up_files_may_be_executed_again(environment, on):
    code = f"""
import site, sys
def ours():
    return [one for one in sys.meta_path if hasattr(one, "finds_nothing")]
for _ in range(2):
    site.addsitedir({str(environment.site)!r})
assert len(ours()) == 1, ours()
{PATCHED}
site.addsitedir({str(environment.site)!r})
import precision_shim
precision_shim.uninstall()
site.addsitedir({str(environment.site)!r})
assert not ours(), ours()
"""
    done = environment.run("-c", code, **on)
    assert (done.stdout, done.stderr) == ("-2\n", "")


def test_the_entry_point_of_pep_829_is_inert_when_off(environment):
    code = "from precision_shim.process import standby, startup; startup.init(); "
    code += "print(standby.waiting())"
    assert environment.run("-c", code).stdout == "False\n"
    assert environment.run("-c", code, PRECISION_SHIM="0").stdout == "False\n"
    assert environment.run("-c", code, PRECISION_SHIM="1").stdout == "True\n"


# -- what wakes it ----------------------------------------------------------------------------


def test_a_third_party_unnamed_is_found_with_torch(environment, write_files, tmp_path):
    write_files(tmp_path, {"torch.py": ""})
    for order in ("import torch", "import toy, torch"):
        done = environment.run(
            "-c", f"{order}; {PATCHED}", PRECISION_SHIM="1", PYTHONPATH=str(tmp_path)
        )
        assert (done.stdout, done.stderr) == ("-2\n", "")


def test_status_tells_that_the_process_waits(environment, on):
    code = """
import precision_shim
status = precision_shim.status()
assert status.enabled
print(sorted((name, one.state) for name, one in status.frameworks.items() if one.version))
"""
    done = environment.run("-c", code, **on)
    assert (done.stdout, done.stderr) == ("[('solo', 'pending'), ('toy', 'pending')]\n", "")


def test_status_tells_that_no_start_up_file_was_read(environment, on):
    path = f"import sys; sys.path.append({str(environment.site)!r}); import precision_shim; "
    done = environment.run("-S", "-c", path + "print(precision_shim.status())", **on)
    assert "read no start-up" in done.stdout
    assert "read no start-up" not in environment.run("-S", "-c", path + "print()").stdout


def test_uninstall_before_anything_was_imported(environment, on):
    done = environment.run(
        "-c", f"import precision_shim; precision_shim.uninstall(); {PATCHED}", **on
    )
    assert (done.stdout, done.stderr) == ("2\n", "")


# -- what is wrong ----------------------------------------------------------------------------


def test_a_bad_switch_is_one_line_and_nothing_else(environment, write_files, tmp_path):
    """A bad switch causes one line, and only in processes that import torch, Ray or a framework."""
    write_files(tmp_path, {"torch.py": ""})
    variables = {"PRECISION_SHIM": "maybe", "PYTHONPATH": str(tmp_path)}
    assert environment.run("-c", "import json", **variables).stderr == ""
    done = environment.run("-c", f"import torch; {PATCHED}", **variables)
    assert done.stdout == "2\n"
    (line,) = done.stderr.splitlines()
    assert "PRECISION_SHIM='maybe'" in line
    assert "strict" in line


@pytest.mark.parametrize("variable", BAD)
def test_a_bad_value_is_one_line_and_the_process_goes_on(environment, on, variable):
    variables = {**on, variable: BAD[variable]}
    done = environment.run("-c", f"{PATCHED}; import solo", **variables)
    assert done.stdout == "2\n"
    (line,) = done.stderr.splitlines()
    assert variable in line
    assert "allowed" in line
    assert environment.run("-c", "pass", **variables).stderr == ""


@pytest.mark.parametrize("variable", BAD)
def test_a_bad_value_under_strict_is_raised_where_an_optimizer_is_built(
    environment, on, variable, write_files, tmp_path
):
    megatron = "megatron/core/optimizer/optimizer_config.py"
    config = "class OptimizerConfig:\n    def __post_init__(self): ...\n"
    write_files(tmp_path, {megatron: config})
    code = """
from toy import ops
assert ops.scale(1) == 2
from megatron.core.optimizer.optimizer_config import OptimizerConfig
import precision_shim
status = precision_shim.status()
assert not status.enabled and status.notes
try:
    OptimizerConfig().__post_init__()
except precision_shim.SettingsError as error:
    print(error)
"""
    variables = {**on, variable: BAD[variable], "PRECISION_SHIM": "strict"}
    done = environment.run("-c", code, PYTHONPATH=str(tmp_path), **variables)
    (line,) = done.stderr.splitlines()
    assert done.stdout.strip() in line
    assert variable in done.stdout
    for harmless in ("pass", "import encodings.idna, sysconfig, venv"):
        assert environment.run("-c", harmless, **variables).stderr == ""


ADAPTERS = {
    "raises": "raise RuntimeError('no luck')",
    "exits": "raise SystemExit(3)",
    "lacks": "",
    "other": "ADAPTER = 1",
}


@pytest.mark.parametrize(
    ("fault", "strict"), [*((one, False) for one in ADAPTERS), ("exits", True)]
)
def test_a_broken_adapter(environment, write_files, tmp_path, fault, strict):
    write_files(
        tmp_path,
        {
            "odd.py": "",
            "odd_shim.py": ADAPTERS[fault],
            "odd-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n",
            "odd-1.0.dist-info/entry_points.txt": (
                "[precision_shim.adapters]\nodd = odd_shim:ADAPTER\n"
            ),
            "megatron/core/optimizer/optimizer_config.py": (
                "class OptimizerConfig:\n    def __post_init__(self): ...\n"
            ),
        },
    )
    code = """
import odd, solo
assert solo.scale(1) == -2
from megatron.core.optimizer.optimizer_config import OptimizerConfig
import precision_shim
try:
    OptimizerConfig().__post_init__()
    print("built")
except precision_shim.SeamError as error:
    print(error)
"""
    variables = {
        "PRECISION_SHIM": "strict" if strict else "1",
        "PRECISION_SHIM_FRAMEWORKS": "odd,solo",
        "PYTHONPATH": str(tmp_path),
    }
    done = environment.run("-c", code, **variables)
    (line,) = done.stderr.splitlines()
    assert "odd_shim:ADAPTER" in line
    if strict:
        assert done.stdout.strip() in line
    else:
        assert done.stdout == "built\n"


def test_no_stderr_no_exception(environment):
    code = (
        "import sys; sys.stderr = None; import precision_shim.process.startup as s; "
        "s.init(); print('on')"
    )
    assert environment.run("-c", code, PRECISION_SHIM="maybe").stdout == "on\n"
