"""Which directories and files make a checkpoint, and the advice on how to go on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ...processes.commands import command
from .test_reading import one_sentence, run
from .written import distributed, megatrons, of_ranks


@pytest.mark.parametrize(
    ("lost", "within"), [("metadata.json", False), ("common.pt", False), ("metadata.json", True)]
)
def test_megatrons_files(tmp_path: Path, capsys: Any, lost: str, within: bool) -> None:
    folder = megatrons(tmp_path / "saved", within=within)
    (folder / lost).unlink()
    assert run(folder) == 2
    assert f"{lost}: it is missing" in one_sentence(capsys)


# -- the advice on how to go on -------------------------------------------------------------------


def test_the_advice_on_a_damaged_checkpoint(tmp_path: Path, capsys: Any) -> None:
    folder = of_ranks(tmp_path / "global_step_100" / "actor")
    (folder / "optim_world_size_2_rank_0.pt").unlink()
    for path in (tmp_path, folder.parent, folder):
        assert run(path) == 2
        line = one_sentence(capsys)
        assert f"{folder}/optim_world_size_2_rank_0.pt: it is missing." in line
        assert "Take another checkpoint" in line


def test_no_directory_above_the_checkpoint_is_listed(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a home directory with very many files, on a network."""
    place = tmp_path / "copied" / "actor"
    of_ranks(place)
    (place / "optim_world_size_2_rank_0.pt").unlink()
    listed: list[Path] = []
    for name in ("listdir", "scandir"):
        own = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda path=".", own=own: (listed.append(Path(path)), own(path))[1]
        )
    assert run(place) == 2
    assert "optim_world_size_2_rank_0.pt: it is missing" in one_sentence(capsys)
    assert place in listed
    assert not set(listed) & set(place.parents)


def test_what_to_give_instead_of_nothing(tmp_path: Path, capsys: Any) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        assert run(path) == 2
        assert "Give the directory of a run, of a step" in one_sentence(capsys)
    distributed(tmp_path / "saved")
    assert run(tmp_path / "saved" / ".metadata") == 2
    assert ".metadata: this is a file. Give the directory" in one_sentence(capsys)


def test_a_directory_that_cannot_be_read(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run" / "b").mkdir(parents=True)
    own = Path.resolve

    def denied(path: Path) -> Path:
        if path.name == "b":
            raise PermissionError(13, "Permission denied", str(path))
        return own(path)

    monkeypatch.setattr(Path, "resolve", denied)
    assert run(tmp_path / "run") == 2
    assert f"{tmp_path / 'run' / 'b'}: it cannot be read (Permission denied)" in one_sentence(
        capsys
    )


def test_a_path_that_is_empty() -> None:
    code, _, err = command("checkpoint", "")
    assert (code, "PATH is empty: is a variable not set? Give the directory" in err) == (2, True)


# -- what --config takes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("exp_avg_dtype=fp61", "exp_avg_dtype='fp61' is not a dtype name"),
        ("precision=fp61", "precision='fp61' is not a dtype name"),
        ("exp_avg_dtyp=bf16", "did you mean exp_avg_dtype?"),
        ("precison=fp16", "did you mean precision?"),
        ("mixed_precision.param_dtype=fp16", "did you mean precision?"),
        ("override_optimizer_config.exp_avg_dtyp=bf16", "did you mean exp_avg_dtype?"),
        ("use_legacy_worker_impl=no", "allowed: auto, enable, disable"),
    ],
)
def test_a_name_that_is_none(tmp_path: Path, capsys: Any, text: str, told: str) -> None:
    folder = distributed(tmp_path / "saved")
    assert run(folder, "--framework=verl", "--config", text) == 2
    assert told in " ".join(capsys.readouterr().err.split())
