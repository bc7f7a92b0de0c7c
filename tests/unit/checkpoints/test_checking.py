"""Checksums prove some bytes of a checkpoint whole; the report mentions all other bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from precision_shim.checkpoints import finding
from precision_shim.checkpoints.checking import check
from precision_shim.checkpoints.reading import read_parts
from precision_shim.checkpoints.tensors import check_archive
from precision_shim.cli import main
from precision_shim.errors import CheckpointUnreadableError

from .test_reading import one_sentence, run
from .written import KINDS, distributed, megatrons, of_ranks, safetensors

VALUE = 1234.5
"""A number whose bytes the tests can find in a file."""


def changed(file: Path) -> None:
    """Change one bit of a tensor's values."""
    content = bytearray(file.read_bytes())
    at = content.find(torch.tensor(VALUE).numpy().tobytes())
    assert at >= 0
    content[at] ^= 1
    file.write_bytes(content)


def saved(file: Path) -> Path:
    torch.save({"weight": torch.full((100,), VALUE)}, file)
    return file


@pytest.fixture
def no_checksums() -> Iterator[None]:
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(True)


def test_a_value_that_was_changed(tmp_path: Path) -> None:
    file = saved(tmp_path / "one.pt")
    whole = file.read_bytes()
    held = check_archive(file)
    at = whole.find(torch.tensor(VALUE).numpy().tobytes())
    assert any(start <= at and at + 400 <= end for start, end in held)
    changed(file)
    assert not torch.equal(torch.load(file)["weight"], torch.full((100,), VALUE))  # without a word
    with pytest.raises(CheckpointUnreadableError, match=r"one\.pt: its record 'data/0' is damaged"):
        check_archive(file)


def test_an_archive_within_a_file(tmp_path: Path) -> None:
    content = saved(tmp_path / "one.pt").read_bytes()
    file = tmp_path / "three.distcp"
    file.write_bytes(b"before" + content + b"behind")
    held = check_archive(file, 6, len(content))
    assert min(start for start, _ in held) > 6
    changed(file)
    with pytest.raises(CheckpointUnreadableError, match="checksum does not hold"):
        check_archive(file, 6, len(content))


def test_an_archive_without_checksums(tmp_path: Path, no_checksums: None) -> None:
    """torch can omit an archive's checksums: then nothing is damaged, and nothing is checked."""
    folder = of_ranks(tmp_path / "saved")
    (part,) = read_parts(folder)
    assert part.dtypes("params") == {"fp32": 24}
    found = check(part)
    assert (found.bytes("checked"), found.bytes("not_read")) == (0, 0)
    assert found.bytes("no_checksum") == found.size > 0


def test_a_record_that_is_gone(tmp_path: Path) -> None:
    file = saved(tmp_path / "one.pt")
    content = file.read_bytes()
    file.write_bytes(content.replace(b"data/0", b"data/7"))
    with pytest.raises(CheckpointUnreadableError, match="record 'data/0' is missing"):
        check_archive(file)


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_is_in_one_state(tmp_path: Path, kind: str) -> None:
    folder = KINDS[kind](tmp_path / "saved")
    (folder / "notes.txt").write_text("of the user's")
    (part,) = read_parts(folder)
    for most in (None, 0, 3000):
        found = check(part, most)
        assert found.size == sum(one.stat().st_size for one in folder.iterdir())
        states = ("checked", "not_read", "no_checksum", "not_looked_at")
        assert sum(map(found.bytes, states)) == found.size
        assert found.bytes("not_looked_at") == len("of the user's")
        if kind != "safetensors":
            assert (found.bytes("not_read") > 0) is (most is not None)
            assert (found.bytes("checked") > 0) is (most != 0)


def test_the_small_files_come_first(tmp_path: Path) -> None:
    folder = of_ranks(tmp_path / "saved", 1)
    torch.save({"weight": torch.zeros(100_000)}, folder / "model_world_size_1_rank_0.pt")
    (part,) = read_parts(folder)
    found = {one.path.name: one for one in check(part, 50_000).files}
    assert found["model_world_size_1_rank_0.pt"].bytes("checked") == 0
    assert found["optim_world_size_1_rank_0.pt"].bytes("checked") > 0


def big(folder: Path) -> Path:
    of_ranks(folder, 1)
    torch.save(
        {"weight": torch.full((80_000_000,), VALUE)}, folder / "model_world_size_1_rank_0.pt"
    )
    return folder


def test_what_was_not_read_is_said(tmp_path: Path, capsys: Any) -> None:
    """Of a file over 256 MiB only a sample is read; the report names --full to read all."""
    folder = big(tmp_path / "saved")
    changed(folder / "model_world_size_1_rank_0.pt")
    assert run(folder) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "not read 305.2 MiB in 1 file (over 99.9%): model_world_size_1_rank_0.pt" in text
    assert "--full reads" in text
    assert run(folder, "--json") == 1
    (part,) = json.loads(capsys.readouterr().out)["parts"]
    told = part["files"]["not_read"]
    assert told["files"] == {"model_world_size_1_rank_0.pt": told["bytes"]}
    assert told["share"] == told["bytes"] / part["files"]["bytes"] > 0.99
    assert run(folder, "--full") == 2
    line = one_sentence(capsys)
    assert "model_world_size_1_rank_0.pt: its record 'data/0' is damaged" in line
    assert "Take another checkpoint" in line


def test_all_that_is_damaged_is_counted(tmp_path: Path, capsys: Any) -> None:
    folder = of_ranks(tmp_path / "saved")
    for rank in range(2):
        file = folder / f"model_world_size_2_rank_{rank}.pt"
        torch.save({"weight": torch.full((100,), VALUE)}, file)
        changed(file)
    assert run(folder) == 2
    assert "; 1 more file is damaged." in one_sentence(capsys)


# -- what is missing ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lost", "within"),
    [("metadata.json", False), ("common.pt", False), ("metadata.json", True)],
)
def test_megatrons_files(tmp_path: Path, capsys: Any, lost: str, within: bool) -> None:
    folder = megatrons(tmp_path / "saved", within=within)
    (folder / lost).unlink()
    assert run(folder) == 2
    assert f"{lost}: it is missing" in one_sentence(capsys)


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "3", '{"sharded_backend": "torch_dyst"}', '{"sharded_bakend": "x"}', "{}"],
)
def test_megatrons_config_is_damaged(tmp_path: Path, capsys: Any, content: str) -> None:
    folder = megatrons(tmp_path / "saved")
    (folder / "metadata.json").write_text(content)
    assert run(folder) == 2
    assert "metadata.json: " in one_sentence(capsys)


def test_a_file_of_several_is_missing(tmp_path: Path, capsys: Any) -> None:
    folder = safetensors(tmp_path / "saved")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    assert run(folder) == 2
    assert "model-00002-of-00002.safetensors: it is missing" in one_sentence(capsys)
    (folder / "model-00001-of-00002.safetensors").rename(folder / "weights.safetensors")
    index = {"weight_map": {"norm": "weights.safetensors", "weight": "more.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert run(folder) == 2
    assert "more.safetensors: it is missing" in one_sentence(capsys)
    (folder / "model.safetensors.index.json").write_text("{")
    assert run(folder) == 2
    assert "no whole index" in one_sentence(capsys)


def test_safetensors_that_end_elsewhere(tmp_path: Path, capsys: Any) -> None:
    folder = safetensors(tmp_path / "saved")
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"more")
    assert run(folder) == 2
    assert "model.safetensors" in one_sentence(capsys)


# -- the advice on how to go on -------------------------------------------------------------------


def test_the_step_before_is_named(tmp_path: Path, capsys: Any) -> None:
    for step in (5, 20, 100):
        of_ranks(tmp_path / f"global_step_{step}" / "actor")
    (tmp_path / "global_step_100" / "actor" / "optim_world_size_2_rank_0.pt").unlink()
    for path in (tmp_path, tmp_path / "global_step_100", tmp_path / "global_step_100" / "actor"):
        assert run(path) == 2
        line = one_sentence(capsys)
        assert "optim_world_size_2_rank_0.pt is missing" in line
        assert f"Take the checkpoint before it, {tmp_path / 'global_step_20'}," in line
    (tmp_path / "global_step_200").mkdir()
    assert run(tmp_path) == 2
    line = one_sentence(capsys)
    assert "the directory is empty" in line
    assert f"The step before it is {tmp_path / 'global_step_100'}." in line


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
    assert "optim_world_size_2_rank_0.pt is missing" in one_sentence(capsys)
    assert place in listed
    assert not set(listed) & set(place.parents)


def test_what_to_give_instead_of_nothing(tmp_path: Path, capsys: Any) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        assert run(path) == 2
        assert "Give the directory of a run, of a step" in one_sentence(capsys)
    distributed(tmp_path / "saved")
    assert run(tmp_path / "saved" / ".metadata") == 2
    assert "Give the directory" in one_sentence(capsys)


def test_directories_that_are_no_checkpoint(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as ``/``: a directory that cannot be read, or too many of them."""
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", ""])
    assert ended.value.code == 2
    assert "PATH is empty: is a variable not set? Give the directory" in capsys.readouterr().err
    for name in ("a", "b", "c"):
        (tmp_path / "run" / name).mkdir(parents=True)
    monkeypatch.setattr(finding, "_MOST", 3)
    assert run(tmp_path / "run") == 2
    line = one_sentence(capsys)
    assert line.startswith(f"{tmp_path / 'run'}: no checkpoint in the first 3 directories. Give")
    own = Path.resolve

    def denied(path: Path) -> Path:
        if path.name == "b":
            raise PermissionError(13, "Permission denied", str(path))
        return own(path)

    monkeypatch.setattr(Path, "resolve", denied)
    assert run(tmp_path / "run") == 2
    line = one_sentence(capsys)
    assert line.startswith(f"{tmp_path / 'run' / 'b'}: it cannot be read (Permission denied). Make")
    assert "damaged" not in line


# -- what --config takes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("exp_avg_dtype=fp61", "exp_avg_dtype='fp61' is not a dtype name"),
        ("precision=fp61", "precision='fp61' is not a dtype name"),
        ("exp_avg_dtyp=bf16", "did you mean exp_avg_dtype?"),
        ("precison=fp16", "did you mean precision?"),
        ("use_legacy_worker_impl=no", "allowed: auto, enable, disable"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_name_that_is_none(tmp_path: Path, capsys: Any, kind: str, text: str, told: str) -> None:
    folder = KINDS[kind](tmp_path / "saved")
    assert run(folder, "--framework=verl", "--config", text) == 2
    assert told in " ".join(capsys.readouterr().err.split())
