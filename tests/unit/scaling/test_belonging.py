"""Fingerprints of a checkpoint's files depend on content alone, and read little of it."""

from __future__ import annotations

import os
import random
import shutil
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precision_shim.scaling.belonging import (
    are_fingerprints,
    files_beneath,
    fingerprint,
    fingerprints,
    foreign,
)


def archive(path, members):
    """Write a zip file as ``torch.save`` does, without compression."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as made:
        for name, content in members.items():
            made.writestr(zipfile.ZipInfo(name), content)
    return path


def test_a_copy_has_the_same_wherever_it_lies_and_whenever_it_was_made(tmp_path):
    path = archive(tmp_path / "optim.pt", {"data.pkl": b"a" * 100, "data/0": os.urandom(1 << 20)})
    copy = shutil.copyfile(path, tmp_path / "copied")
    os.utime(copy, (1, 1))
    assert fingerprint(copy) == fingerprint(path)
    assert are_fingerprints({"copied": fingerprint(copy)})


def test_every_byte_of_a_zip_files_members_counts(tmp_path):
    """A byte that is not read itself still changes its member's CRC-32, which is read."""
    content = bytearray(random.Random(3).randbytes(3 << 20))
    whole = fingerprint(archive(tmp_path / "a.pt", {"data/0": bytes(content)}))
    for position in range(0, len(content), 99_991):
        content[position] ^= 1
        assert fingerprint(archive(tmp_path / "a.pt", {"data/0": bytes(content)})) != whole
        content[position] ^= 1


@pytest.mark.parametrize("size", [0, 1, 1 << 14, (1 << 18) - 1, 1 << 18])
def test_every_byte_of_a_small_file_counts(tmp_path, size):
    path = tmp_path / ".metadata"
    content = bytearray(random.Random(size).randbytes(size))
    path.write_bytes(content)
    whole = fingerprint(path)
    for position in {0, size // 3, size - 1} & set(range(size)):
        content[position] ^= 1
        path.write_bytes(content)
        assert fingerprint(path) != whole
        content[position] ^= 1


def test_what_is_missing_has_none_and_what_cannot_be_read_is_an_error(tmp_path):
    there = tmp_path / "there"
    there.write_bytes(b"1")
    assert set(fingerprints({"a": there, "b": tmp_path / "gone"})) == {"a"}
    with pytest.raises(IsADirectoryError):
        fingerprint(tmp_path)


names = st.sampled_from(["model", "optim", "extra"])
some = st.dictionaries(names, st.sampled_from(["1", "2"]))


@given(some.filter(bool), some)
def test_a_file_is_foreign_if_it_is_there_and_not_as_it_was(bound, found):
    expected = [name for name in found if bound.get(name) != found[name]]
    assert foreign(bound, found) == sorted(expected)
    assert foreign(found, found) == []
    assert foreign(bound, {}) == []  # removed on purpose


def test_a_file_that_no_load_reads_is_not_foreign():
    bound = {".metadata": "1", "__0_0.distcp": "1"}
    assert foreign(bound, {**bound, "__1_0.distcp": "2", "../weights/.metadata": "2"}) == []
    assert foreign({"__0_0.distcp": "1"}, {".metadata": "2"}) == [".metadata"]
    assert foreign(bound, {"__0_0.distcp": "2"}) == ["__0_0.distcp"]


def test_which_files_of_a_directory(tmp_path):
    inside = {
        "model_world_size_2_rank_0.pt",
        "extra_state_world_size_2_rank_1.pt",
        "optim/.metadata",
        "optim/__0_0.distcp",
        "model/shard-00001-model-00001-of-00001.safetensors",
    }
    for name in (*inside, "config.json", "huggingface/model.safetensors", "a/b/.metadata"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    assert set(files_beneath(tmp_path)) == inside
    assert set(files_beneath(tmp_path, "../a/")) == {f"../a/{name}" for name in inside}
    assert files_beneath(tmp_path / "gone") == {}


@pytest.mark.parametrize("value", [None, [], {"a": 1}, {"a": "12"}, {"a": "1:xyz"}, {1: "1:0"}])
def test_what_can_be_no_fingerprints(value):
    assert not are_fingerprints(value)
