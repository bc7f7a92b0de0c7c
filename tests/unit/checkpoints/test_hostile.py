"""Malicious files: the reader returns an answer or one sentence, and runs nothing."""

from __future__ import annotations

import copyreg
import json
import os
import pickle
import struct
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from precision_shim.errors import CheckpointUnreadableError
from precision_shim.files.pickles import read_pickle
from precision_shim_tools.checkpoint.layout import Outcome
from precision_shim_tools.checkpoint.reading import read_parts
from precision_shim_tools.checkpoint.report import Examined

from .test_reading import one_sentence, run
from .written import distributed, megatrons, of_ranks

SYSTEM = b"cos\nsystem\n"
TOUCH = b"S'touch done'\n"

CALLING = {
    "REDUCE": SYSTEM + TOUCH + b"\x85R.",
    "NEWOBJ": b"\x80\x02" + SYSTEM + TOUCH + b"\x85\x81.",
    "NEWOBJ_EX": b"\x80\x04" + SYSTEM + TOUCH + b"\x85}\x92.",
    "INST": b"(" + TOUCH + b"ios\nsystem\n.",
    "OBJ": b"(" + SYSTEM + TOUCH + b"o.",
    "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06system\x93" + TOUCH + b"\x85R.",
    "a dotted name": b"\x80\x04\x8c\x07pathlib\x8c\x09os.system\x93" + TOUCH + b"\x85R.",
    "BUILD": SYSTEM + b")R" + TOUCH + b"b.",
    "BUILD of the name": SYSTEM + TOUCH + b"b.",
    "BUILD of a name's attribute": SYSTEM + b"N}S'__setstate__'\n" + SYSTEM + b"s\x86b.",
    "BUILD, then BUILD by what was set": b"cmine\nThing\n)R}S'__setstate__'\n"
    + SYSTEM
    + b"sb"
    + TOUCH
    + b"b.",
    "BUILD of an OrderedDict": b"ccollections\nOrderedDict\n)R}S'__setstate__'\n"
    + SYSTEM
    + b"sb"
    + TOUCH
    + b"b.",
    "BUILD of a class of ours": b"ccollections\nOrderedDict\nN}S'__setitem__'\n"
    + SYSTEM
    + b"s\x86b.",
    "APPEND": SYSTEM + b")R" + TOUCH + b"a.",
    "APPENDS to the name": SYSTEM + b"(" + TOUCH + b"e.",
    "SETITEM": SYSTEM + b")R" + TOUCH + TOUCH + b"s.",
    "ADDITEMS": b"\x80\x04" + SYSTEM + b")R(" + TOUCH + b"\x90.",
    "a persistent id": b"\x80\x02" + SYSTEM + TOUCH + b"\x85R" + b"Q.",
    "a persistent id that is called": b"\x80\x02" + SYSTEM + b"Q" + TOUCH + b"\x85R.",
    "eval": b'cbuiltins\neval\nS\'__import__("os").system("touch done")\'\n\x85R.',
    "getattr": b"cbuiltins\ngetattr\n" + b"cos\n__dict__\n" + TOUCH + b"\x86R" + TOUCH + b"\x85R.",
    "dropped": b"(" + SYSTEM + TOUCH + b"\x85R0N.",
}
"""Pickles that call a function of their choice, one for each of pickle's ways, and tricks beside.

Those that are refused by ``pickle`` itself are here to show that nothing ran before.
"""


def read(content: bytes) -> Any:
    """Read a pickle; returns ``None`` if it is refused."""
    try:
        return read_pickle(content, "here")
    except CheckpointUnreadableError as error:
        assert str(error).startswith("here: no whole pickle")  # noqa: PT017
        return None


@pytest.mark.parametrize("name", CALLING)
def test_a_pickle_calls_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    imported = set(sys.modules)
    read(CALLING[name])
    assert list(tmp_path.iterdir()) == []
    assert set(sys.modules) == imported


def test_no_module_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert read(b"cplanted\nThing\n)R.").kind == "planted.Thing"


def test_what_another_reader_left_in_pickles_cache() -> None:
    """An extension code names an object without a name; pickle keeps those that it has found."""
    code = 0xEF
    copyreg.add_extension("textwrap", "dedent", code)
    try:
        own = pickle.dumps(textwrap.dedent, 2)
        assert b"\x82\xef" in own
        assert pickle.loads(own) is textwrap.dedent  # now it is in the cache
        found = read(own[:-1] + b")R.")
        assert (found.kind, found.arguments) == ("textwrap.dedent", ())
        assert pickle.loads(own) is textwrap.dedent
    finally:
        copyreg.remove_extension("textwrap", "dedent", code)


BROKEN = {
    "more than it has": b"\x80\x02NR.",
    "an end without a beginning": b"\x80\x02t.",
    "an extension that there is not": b"\x80\x02\x82\x01.",
    "no end": b"\x80\x02N",
    "nothing": b"",
    "a key that is no key": b"}]Ns.",
}


@pytest.mark.parametrize("name", BROKEN)
def test_pickles_that_pickle_does_not_take(name: str) -> None:
    with pytest.raises(CheckpointUnreadableError, match="here: no whole pickle"):
        read_pickle(BROKEN[name], "here")


def test_links_that_lead_back(tmp_path: Path, capsys: Any) -> None:
    for number in range(40):
        (tmp_path / f"link{number}").symlink_to(tmp_path, target_is_directory=True)
    assert run(tmp_path) == 2
    one_sentence(capsys)


def test_a_terminals_commands(tmp_path: Path, capsys: Any) -> None:
    tensor = {"dtype": "\x1b[2J", "shape": [2], "data_offsets": [0, 4]}
    header = json.dumps({"weight": tensor}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(64)
    (tmp_path / "model.safetensors").write_bytes(content)
    assert run(tmp_path) == 2
    assert "\x1b" not in one_sentence(capsys)


FORGED = "x\x1b[8m\nresumed here  exact"


def test_a_name_makes_no_line_of_its_own(tmp_path: Path, capsys: Any) -> None:
    folder = of_ranks(tmp_path / "saved", 1)
    (folder / f"{FORGED}.bin").write_bytes(b"")
    (part,) = read_parts(folder)
    (unknown,) = part.unknown
    for line in Examined(part, Outcome("not known", unknown)).lines():
        assert line.isprintable()
    assert run(tmp_path / FORGED) == 2
    assert "\x1b" not in one_sentence(capsys)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["model_world_size_1_rank_0.pt", ".metadata", "a.safetensors"])
def test_a_pipe_is_not_read(tmp_path: Path, capsys: Any, name: str) -> None:
    os.mkfifo(tmp_path / name)
    assert run(tmp_path) == 2
    assert name in one_sentence(capsys)


@pytest.mark.timeout(20)
def test_a_world_of_a_billion_ranks(tmp_path: Path, capsys: Any) -> None:
    torch.save({}, tmp_path / "model_world_size_1000000000_rank_0.pt")
    assert run(tmp_path) == 2
    assert "model_world_size_1000000000_rank_1.pt: it is missing" in one_sentence(capsys)


@pytest.mark.parametrize("shape", [[10**4000, 10**4000], [-1]])
def test_a_shape_that_no_tensor_has(tmp_path: Path, capsys: Any, shape: list[int]) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    assert run(tmp_path) == 2
    assert "more elements" in one_sentence(capsys)


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


@pytest.mark.parametrize(
    ("states", "text"),
    [
        ({"growth_tracker": "0"}, "its growth_tracker is '0'"),
        ({"hysteresis_tracker": None}, "its hysteresis_tracker is None"),
        ({"scale": float("inf")}, "its scale is inf"),
        ({"scale": 0.0}, "its scale is 0.0"),
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
