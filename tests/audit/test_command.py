"""``precision-shim audit DIR`` on the files of 200 ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from precision_shim.auditing import files
from precision_shim.auditing.ranks import numbers
from precision_shim.auditing.record import COMPONENTS, Audit, AuditComponent, AuditPart, Finding

from ..processes.commands import Ended, command, python

WORLD = 200
_DTYPES = {"params": "bf16", "grad_buckets": "bf16", "master": "int16"}


def audit_of(rank: int, subject: str = "actor", **dtypes: str) -> Audit:
    named = {**_DTYPES, "exp_avg": "bf16", "exp_avg_sq": "bf16", **dtypes}
    components = {
        name: AuditComponent((named[name],), 8, 16, 2.0, name not in _DTYPES, "cuda", "live")
        if name in named
        else AuditComponent()
        for name in COMPONENTS
    }
    part = AuditPart("model", "DistributedOptimizer", WORLD, 800, 4, None, components)
    return Audit("verl", subject, rank, WORLD, (part,), {"bytes": 40, "allocated": 80})


def put(folder: Path, *audits: Audit) -> None:
    for one in audits:
        files.write(folder, files.stem(one), one)


def audited(folder: Path, *options: str) -> Ended:
    return command("audit", folder, *options)


def test_ranks_that_are_alike(tmp_path: Path) -> None:
    put(tmp_path, *(audit_of(rank) for rank in range(WORLD)))
    status, said, _ = audited(tmp_path)
    assert status == 0
    assert "verl actor, model: 200 of 200 ranks" in said
    assert "ranks 0-199: bf16 parameters, bf16 buckets, int16 masters, bf16/bf16 moments" in said


def test_ranks_that_differ_and_that_are_missing(tmp_path: Path) -> None:
    put(tmp_path, *(audit_of(rank) for rank in range(WORLD) if rank not in (7, 31, 198, 199)))
    put(tmp_path, audit_of(7, exp_avg_sq="fp32"), audit_of(31, exp_avg_sq="fp32"))
    status, said, _ = audited(tmp_path)
    assert status == 1
    assert "198 of 200 ranks" in said
    assert "differs, ranks 7, 31: model: exp_avg_sq is fp32, elsewhere bf16" in said
    assert "missing: ranks 198-199" in said
    status, said, _ = audited(tmp_path, "--json")
    (group,) = json.loads(said)["groups"]
    assert status == 1
    assert (list(group["differ"]), group["missing"]) == (["7", "31"], [198, 199])


def test_a_problem_is_named_with_its_ranks(tmp_path: Path) -> None:
    problem = Finding("main-grads-dtype", "model", "grad_buckets", "fp32", "bf16", "it is so")
    put(tmp_path, *(replace(audit_of(rank), problems=(problem,)) for rank in range(WORLD)))
    status, said, _ = audited(tmp_path)
    assert status == 1
    assert "problem, ranks 0-199: main-grads-dtype: it is so" in said


def test_ranks_of_which_none_is_like_the_majority(tmp_path: Path) -> None:
    put(tmp_path, *(audit_of(rank) for rank in range(3)))
    for rank, component in enumerate(("master", "exp_avg", "exp_avg_sq")):
        one = audit_of(rank, **{component: "fp32"})
        put(tmp_path, replace(one, world_size=3))
    status, said, _ = audited(tmp_path)
    assert status == 1
    assert "rank 0: bf16 parameters, bf16 buckets, fp32 masters, bf16/bf16 moments" in said
    assert "differs, rank 1: model: master is int16, elsewhere fp32; model: exp_avg is" in said


def test_a_second_optimizer_of_the_same_names(tmp_path: Path) -> None:
    problem = Finding("main-grads-dtype", "model", "grad_buckets", "fp32", "bf16", "it is so")
    for rank in range(2):
        one = replace(audit_of(rank), world_size=2)
        files.write(tmp_path, files.stem(one), one)
        files.write(tmp_path, f"{files.stem(one)}-2", replace(one, problems=(problem,)))
    status, said, _ = audited(tmp_path)
    assert status == 1
    assert "verl actor, model: 2 of 2 ranks" in said
    assert "verl actor, model, optimizer 2: 2 of 2 ranks" in said
    assert "problem, ranks 0-1: main-grads-dtype: it is so" in said


def test_what_another_job_left_differs(tmp_path: Path) -> None:
    put(tmp_path, *(replace(audit_of(rank), world_size=4) for rank in range(4)))
    put(tmp_path, *(replace(audit_of(rank), world_size=2) for rank in range(2)))
    status, said, _ = audited(tmp_path)
    assert status == 1
    assert "differs, ranks 2-3: ranks of the job is 4, elsewhere 2" in said


def test_two_models_and_a_rank_from_before_its_first_step(tmp_path: Path) -> None:
    put(tmp_path, *(audit_of(rank, name) for rank in range(WORLD) for name in ("actor", "critic")))
    early = audit_of(3)
    (part,) = early.parts
    some = {**part.components, "exp_avg": replace(part.components["exp_avg"], state="later")}
    none = AuditComponent(("bf16",), state="later")
    put(tmp_path, replace(early, parts=(replace(part, components=some),), rank=7))
    later = {**part.components, "exp_avg": none, "exp_avg_sq": none}
    put(tmp_path, replace(early, parts=(replace(part, components=later),)))
    status, said, _ = audited(tmp_path)
    assert status == 0
    assert said.count("200 of 200 ranks") == 2
    assert said.count("from before the first step: rank 3\n") == 1
    assert said.count("without the states of parameters that had no gradient: rank 7\n") == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"framework": 1}', "null"])
def test_a_file_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    put(tmp_path, *(audit_of(rank) for rank in range(WORLD)))
    (tmp_path / f"broken{files.SUFFIX}").write_text(text)
    status, said, _ = audited(tmp_path)
    assert status == 1
    assert f"broken{files.SUFFIX}: " in said


def test_a_file_without_a_component_is_none(tmp_path: Path) -> None:
    put(tmp_path, replace(audit_of(0), world_size=1))
    (path,) = tmp_path.iterdir()
    values = json.loads(path.read_text())
    del values["parts"][0]["components"]["master"]
    path.write_text(json.dumps(values))
    status, said, _ = audited(tmp_path)
    assert status == 1
    assert f"{path.name}: KeyError: 'master'" in said


def test_a_file_is_there_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, audit_of(0))
    (path,) = tmp_path.iterdir()
    before = path.read_text()

    def full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        put(tmp_path, audit_of(0, exp_avg="fp32"))
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    assert path.read_text() == before


def test_it_needs_no_torch(tmp_path: Path) -> None:
    put(tmp_path, *(audit_of(rank) for rank in range(WORLD)))
    source = (
        "import sys; sys.modules['torch'] = None\n"
        "from precision_shim_tools.cli import main\n"
        f"main(['audit', {str(tmp_path)!r}])\n"
    )
    done = python("-c", source)
    assert (done.returncode, done.stderr) == (0, "")


def test_numbers() -> None:
    assert numbers([7]) == "rank 7"
    assert numbers([0, 1, 2, 5, 9, 8]) == "ranks 0-2, 5, 8-9"


def test_an_empty_directory_name_and_none_that_can_be_read(tmp_path: Path) -> None:
    code, _, err = command("audit", "")
    give = "Give the directory that PRECISION_SHIM_AUDIT_DIR named when the job ran."
    assert (code, f"DIR is empty: is a variable not set? {give}" in err) == (2, True)
    for folder in (tmp_path, tmp_path / "none"):
        status, _, told = audited(folder)
        assert status == 2
        assert give in told


def test_a_file_of_an_older_version_is_read(tmp_path: Path) -> None:
    put(tmp_path, replace(audit_of(0), world_size=1))
    (path,) = tmp_path.iterdir()
    values = json.loads(path.read_text())
    for name in ("updates", "shards"):
        del values["parts"][0][name]
    path.write_text(json.dumps(values))
    assert audited(tmp_path)[0] == 0
