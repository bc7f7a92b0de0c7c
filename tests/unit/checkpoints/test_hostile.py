"""Malicious files: the reader soon returns an answer or one sentence, and calls nothing."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch

from precision_shim.checkpoints.pickles import Persistent, read_pickle
from precision_shim.checkpoints.reading import read_parts
from precision_shim.errors import CheckpointUnreadableError

from .test_reading import Harm, one_sentence, run
from .written import distributed, megatrons, of_ranks

SHARED = b"N\x85" + b"2\x86" * 60
"""A pair of twice the same pair, 60 levels deep: few bytes, but 2^60 values to count."""

DEEP = b"N" + b"\x85" * 300_000
"""Tuples nested deeper than the processor's stack allows."""

HARMFUL = {
    "a key that is shared": b"\x80\x02}" + SHARED + b"Ns.",
    "a key that is deep": b"\x80\x02}" + DEEP + b"Ns.",
    "a set's member": b"\x80\x04\x8f(" + SHARED + b"\x90.",
    "a set that is called": b"\x80\x02cbuiltins\nset\n](" + SHARED + b"e\x85R.",
    "pairs for a dict": b"\x80\x02ccollections\nOrderedDict\n](" + SHARED + b"N\x86e\x85R.",
    "a label's": b"\x80\x02}" + SHARED + b"QNs.",
    "a name": b"\x80\x04" + SHARED + b"\x8c\x01a\x93.",
    "a text for bytes": b"\x80\x02c_codecs\nencode\n" + SHARED + b"X\x06\0\0\0latin1\x86R"
    b"\x85\x85}\x85.",
    "copies": b"\x80\x02cbuiltins\nlist\nq\0](" + b"N" * 100_000 + b"e\x85q\1]("
    b"" + b"h\0h\1R" * 2_000 + b"e.",
    "arguments that are a list": b"\x80\x02cbuiltins\nlist\n]\x81.",
}


@pytest.mark.parametrize("name", HARMFUL)
def test_pickles_that_grow(name: str) -> None:
    with pytest.raises(CheckpointUnreadableError, match="no whole pickle"):
        read_pickle(HARMFUL[name], "here")


CALLING = {
    "INST": b"(S'touch done'\nios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nS'touch done'\no.",
    "NEWOBJ_EX": b"\x80\x04cos\nsystem\nS'touch done'\n\x85}\x92.",
    "REDUCE": b"cos\nsystem\nS'touch done'\n\x85R.",
    "dropped": b"(cos\nsystem\nS'touch done'\no1N.",
}
"""Pickles that call a function, one for each of pickle's ways."""


@pytest.mark.parametrize("name", CALLING)
def test_each_way_to_call_is_told_and_not_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    called: set[str] = set()
    # The mark in front makes POP_MARK drop the call's result too.
    content = b"(" + CALLING[name] if name == "dropped" else CALLING[name]
    read_pickle(content, "here", called)
    assert called == {"os.system"}
    assert not (tmp_path / "done").exists()


BROKEN = {
    "more than it has": (b"\x80\x02NR.", "takes more than it has"),
    "an end without a beginning": (b"\x80\x02t.", "an end without a beginning"),
    "an operation of others": (b"\x80\x02\x82\x01.", "the operation EXT1, which no checkpoint"),
    "names that are none": (b"\x80\x04cos\nsystem\n)N\x92.", "with names that are none"),
    "no end": (b"\x80\x02N", "no whole pickle"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_pickles_that_pickle_would_not_take(name: str) -> None:
    content, text = BROKEN[name]
    with pytest.raises(CheckpointUnreadableError, match=text):
        read_pickle(content, "here")


def test_a_label_of_protocol_0() -> None:
    assert read_pickle(b"Pstorage\n.", "here") == Persistent("storage")


def archive(path: Path, content: bytes, how: int = zipfile.ZIP_STORED) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", how) as file:
        file.writestr("archive/data.pkl", content)


def test_an_archive_that_is_compressed(tmp_path: Path, capsys: Any) -> None:
    archive(tmp_path / "model_world_size_1_rank_0.pt", pickle.dumps({}), zipfile.ZIP_DEFLATED)
    assert run(tmp_path) == 2
    assert "compressed" in one_sentence(capsys)


def test_a_file_of_very_many_ranks(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "model_world_size_999999999999999_rank_0.pt").touch()
    assert run(tmp_path) == 2
    assert "rank_1.pt is missing" in one_sentence(capsys)


def test_links_that_lead_back(tmp_path: Path, capsys: Any) -> None:
    for number in range(40):
        (tmp_path / f"link{number}").symlink_to(tmp_path, target_is_directory=True)
    assert run(tmp_path) == 2
    one_sentence(capsys)


TENSORS: dict[str, dict[str, Any]] = {
    "more elements than any": {"shape": [10**200, 10**200]},
    "a size of text": {"shape": ["6"]},
    "less than nothing": {"shape": [-1]},
    "half an element": {"shape": [0.5]},
    "a dtype's digits": {"dtype": "F\u00b2"},
    "a dtype's length": {"dtype": "F" + "9" * 5000},
    "a terminal's commands": {"dtype": "\x1b[2J"},
    "an end before its beginning": {"data_offsets": [8, 0]},
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_cannot_be(tmp_path: Path, capsys: Any, name: str) -> None:
    tensor = {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4], **TENSORS[name]}
    header = json.dumps({"weight": tensor}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(64)
    (tmp_path / "model.safetensors").write_bytes(content)
    assert run(tmp_path) == 2
    assert "\x1b" not in one_sentence(capsys)


def metadata_of(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


@pytest.mark.parametrize("outside", ["../other.distcp", "/etc/hostname"])
def test_a_piece_outside_of_the_directory(tmp_path: Path, capsys: Any, outside: str) -> None:
    folder = distributed(tmp_path / "saved")
    metadata = metadata_of(folder)
    for one in metadata.storage_data.values():
        one.relative_path = outside
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert run(folder) == 2
    assert "no file of this directory" in one_sentence(capsys)


PATHS = PurePath.__module__.encode()
"""``pathlib``, or in Python 3.13 its inner module that imports ``os``."""


@pytest.mark.parametrize(
    "name",
    [(PATHS, b"os.system"), (b"torch", b"os.system"), (b"torch.hub", b"load")],
    ids=["pathlib", "torch", "torch.hub"],
)
def test_names_that_begin_harmlessly(
    tmp_path: Path, capsys: Any, name: tuple[bytes, bytes]
) -> None:
    """pickle follows the dots in a name, whichever module the name begins with."""
    folder = distributed(tmp_path / "saved")
    named = b"".join(b"\x8c" + bytes([len(one)]) + one for one in name)
    text = f"touch {tmp_path / 'done'}".encode()
    call = named + b"\x93\x8c" + bytes([len(text)]) + text + b"\x85R"
    whole = (folder / ".metadata").read_bytes()
    head = pickle.dumps(None, 4)[:2]
    # The call's result is dropped; the rest is the unchanged metadata.
    harmful = head + call + b"0" + pickle.dumps(pickle.loads(whole), 3)[2:]
    (folder / ".metadata").write_bytes(harmful)
    assert run(folder) == 2
    assert "do not load it" in one_sentence(capsys)
    assert not (tmp_path / "done").exists()
    if b"os.system" in name:
        pickle.load(io.BytesIO(harmful))
        assert (tmp_path / "done").exists()


class Shared:
    """Each level is a dict that contains the next dict twice."""

    def __init__(self, depth: int) -> None:
        self.tree: Any = {}
        for _ in range(depth):
            self.tree = {"a": self.tree, "b": self.tree}


def test_a_record_that_grows(tmp_path: Path) -> None:
    folder = of_ranks(tmp_path / "saved", 1)
    record = {"kind": "precision_shim.loss_scaler", "format": 1, "state": Shared(60).tree}
    content = {"client_state": {"precision_shim_scaler": record}}
    torch.save(content, folder / "extra_state_world_size_1_rank_0.pt")
    (part,) = read_parts(folder)
    assert part.scaler.state == "damaged"


@pytest.mark.parametrize(
    ("states", "text"),
    [
        ({"growth_tracker": "0"}, "no whole number"),
        ({"hysteresis_tracker": [1]}, "no whole number"),
    ],
)
def test_megatrons_scaler(tmp_path: Path, states: dict[str, Any], text: str) -> None:
    folder = megatrons(tmp_path / "saved")
    scaler = {"scale": 2.0, "growth_tracker": 0, "hysteresis_tracker": 1, **states}
    torch.save({"optimizer": {"grad_scaler": scaler}}, folder / "common.pt")
    (part,) = read_parts(folder)
    assert (part.scaler.state, text in part.scaler.text) == ("damaged", True)


def test_a_sharding_that_is_no_text(tmp_path: Path, capsys: Any) -> None:
    folder = megatrons(tmp_path / "saved")
    wrong = {"param_state_sharding_type": torch.float32}
    torch.save({"optimizer": wrong}, folder / "common.pt")
    assert run(folder, "--json") == 1
    assert json.loads(capsys.readouterr().out)["parts"][0]["sharding"] is None


def test_harm_is_told_of_the_whole_file(tmp_path: Path) -> None:
    called: set[str] = set()
    read_pickle(pickle.dumps([Harm(tmp_path / "done")]), "here", called)
    assert {one.rpartition(".")[2] for one in called} == {"system"}
