"""``precision-shim doctor --against``, for releases that are not installed."""

from __future__ import annotations

import json
import zipfile

import pytest

from precision_shim_tools.upstream.trees import submodules

from .conftest import write

NEXT = {
    "toy/__init__.py": "raise SystemExit('imported')\n",
    "toy/ops.py": "def scale(value, factor=2):\n    return factor * value\n",
    "toy-2.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: toy\nVersion: 2.0\n",
}
GONE = NEXT | {"toy/ops.py": "raise SystemExit('imported')\n"}


@pytest.fixture
def doctor(environment):
    def run(*arguments, **variables):
        command = ("-m", "precision_shim", "doctor", *map(str, arguments))
        return environment.run(*command, check=False, **variables)

    return run


@pytest.fixture
def against(doctor):
    def run(path, *arguments, status=0, **variables):
        done = doctor("--against", path, "--json", *arguments, **variables)
        assert done.returncode == status, done.stdout + done.stderr
        assert done.stderr == ""
        return json.loads(done.stdout)

    return run


def wheel(folder, files):
    folder.mkdir(exist_ok=True)
    path = folder / "toy-2.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as made:
        for name, text in files.items():
            made.writestr(name, text)
    return path


def test_a_wheel_that_holds(against, tmp_path):
    told = against(wheel(tmp_path, NEXT))
    assert (told["framework"], told["version"], told["ok"]) == ("toy", "2.0", True)
    assert (told["holds"], told["installed"]) == ({"toy": "2.0"}, {})
    assert told["seams"] == [
        {"target": "toy.ops:scale", "feature": "bf16-dispatch", "state": "pending", "reason": ""}
    ]


def test_a_wheel_in_which_a_symbol_is_gone(against, doctor, tmp_path):
    path = wheel(tmp_path, GONE)
    told = against(path, status=1)
    assert not told["ok"]
    assert [one["state"] for one in told["seams"]] == ["refused"]
    assert "toy.ops:scale not found" in told["problems"][0]
    shown = doctor("--against", path)
    assert shown.returncode == 1
    for expected in (
        "toy 2.0, not tested: refused\n",
        "toy 2.0: refused: bf16-dispatch, because: toy.ops:scale not found",
        f"toy 2.0, read in {path.name}\n",
        "\nproblems\n",
    ):
        assert expected in shown.stdout


def test_a_checkout(against, tmp_path):
    files = {f"src/{name}": text for name, text in NEXT.items() if "dist-info" not in name}
    files["src/toy/version.py"] = "__version__ = '2.0'\n"
    told = against(write(tmp_path / "given", files))
    assert (told["version"], told["holds"]) == ("2.0", {"toy": "2.0"})


@pytest.mark.parametrize("filled", [True, False])
def test_a_checkouts_submodules(filled, against, tmp_path):
    """A submodule within a submodule is read; an empty one is named; none lies outside of PATH."""
    here, beneath = tmp_path / "given", "3rdparty/Bridge"
    modules = f'[submodule "a"]\n\tpath = {beneath}\n[submodule "b"]\n\tpath = ../..\n'
    write(here, {**NEXT, ".gitmodules": modules})
    (here / beneath).mkdir(parents=True)
    if filled:
        bridge = {
            f"src/megatron/bridge/{name}": text for name, text in NEXT.items() if "__" in name
        }
        write(here / beneath, {**bridge, ".gitmodules": '[submodule "c"]\n\tpath = core\n'})
        (here / beneath / "core").mkdir()
    given = [here, tmp_path]
    assert [len(list(submodules(one))) for one in given] == [1 + filled, 0]
    assert against(here)["ok"]


@pytest.mark.parametrize(
    ("files", "arguments", "told"),
    [
        ({}, (), "holds no framework"),
        ({"other/__init__.py": ""}, (), "Looked for: "),
        ({"other/__init__.py": ""}, ("--framework", "toy"), "Looked for: toy,"),
        (NEXT, ("--framework", "nobody"), "no framework 'nobody'; allowed: verl"),
        ({"megatron/core/__init__.py": ""}, (), "Name one with --framework"),
    ],
)
def test_a_path_without_a_framework(files, arguments, told, doctor, tmp_path):
    path = write(tmp_path / "given", {"README": "", **files})
    # The toy packages are installed, and their adapters have no seams in Megatron.
    done = doctor("--against", path, "--json", *arguments)
    assert done.returncode == 2
    assert told in json.loads(done.stdout)["error"]
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("lacks", [[], ["vllm.engine.arg_utils: hf_overrides"]])
def test_a_rollout_engine(lacks, against, doctor, tmp_path):
    names = "dtype quantization kv_cache_dtype float16 bfloat16 float32 head_dtype hf_overrides"
    text = f"{names} _get_and_verify_dtype _check_valid_dtype"
    modules = ("engine/arg_utils", "config/model", "model_executor/layers/logits_processor")
    files = {f"vllm/{module}.py": text for module in modules}
    if lacks:
        files["vllm/engine/arg_utils.py"] = text.replace("hf_overrides", "hf_overrides_of")
    files["vllm-1.0.dist-info/METADATA"] = "Metadata-Version: 2.1\nName: vllm\nVersion: 1.0\n"
    path = wheel(tmp_path, {"vllm/__init__.py": "", **files})
    told = against(path, status=len(lacks))
    assert (told["engine"], told["version"], told["lacks"]) == ("vllm", "1.0", lacks)
    assert "vllm.config.model: _check_valid_dtype" in told["has"]
    said = doctor("--against", path).stdout
    assert ("  lacks  vllm.engine.arg_utils: hf_overrides" in said) is bool(lacks)
