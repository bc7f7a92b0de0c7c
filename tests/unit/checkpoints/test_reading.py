"""What the doctor reads in files: dtypes, bytes, masters, moments, the loss scaler's record."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from precision_shim.files.pickles import read_pickle
from precision_shim.scaling import FILE_NAME, save
from precision_shim_tools.checkpoint.reading import read_parts
from precision_shim_tools.checkpoint.tensors import Archive, Tensor
from precision_shim_tools.checkpoint.values import samples
from precision_shim_tools.cli import main
from precision_shim_tools.cli.checkpoint import _config

from ...processes.commands import python
from .written import (
    ELEMENTS,
    KINDS,
    distributed,
    megatrons,
    of_ranks,
    safetensors,
    scaler,
    state,
    with_record,
)

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=20,
)


@given(plain, st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_plain_data_comes_back(value: Any, protocol: int) -> None:
    assert read_pickle(pickle.dumps(value, protocol), "here") == value
    again = OrderedDict(one=value, two=[value, value])
    assert read_pickle(pickle.dumps(again, protocol), "here") == dict(again)


def test_what_is_shared_stays_shared() -> None:
    inner = [1]
    found = read_pickle(pickle.dumps([inner, inner]), "here")
    assert found[0] is found[1]


def test_a_distributed_checkpoint(tmp_path: Path) -> None:
    (part,) = read_parts(distributed(tmp_path / "saved"))
    assert (part.kind, part.masters, part.scaler.state) == ("dcp", "none", "none")
    assert part.dtypes("params") == {"bf16": ELEMENTS}
    assert part.bytes("params") == 2 * ELEMENTS
    assert part.dtypes("exp_avg") == part.dtypes("exp_avg_sq") == {"fp32": ELEMENTS}
    assert part.bytes("exp_avg") == 4 * ELEMENTS


def test_moments_that_were_bf16_are_told_by_their_values(tmp_path: Path) -> None:
    (part,) = read_parts(distributed(tmp_path / "saved", **state(torch.bfloat16)))
    assert part.bf16_moments == {"exp_avg": True, "exp_avg_sq": False}


@pytest.mark.parametrize(
    ("master", "told"),
    [
        (torch.randn(6, 4), "fp32"),
        (torch.arange(ELEMENTS).reshape(6, 4).short() - 9, "int16 remainders"),
        (
            torch.arange(ELEMENTS).reshape(6, 4).float() * 100 - 900,
            "int16 remainders, stored as fp32 numbers",
        ),
        (torch.ones(6, 4), "fp32"),  # a norm's masters look like this tensor
    ],
)
def test_masters_are_told_by_dtype_and_values(
    tmp_path: Path, master: torch.Tensor, told: str
) -> None:
    key = "optimizer.state.param.other.weight"
    (part,) = read_parts(megatrons(tmp_path / "saved", **{key: master}))
    assert part.masters == told
    assert part.facts["sharding"] == "fully_reshardable"
    with_norm = {key: master, "optimizer.state.param.norm.weight": torch.randn(6, 4)}
    (part,) = read_parts(megatrons(tmp_path / "mixed", **with_norm))
    assert part.masters == told


@pytest.mark.parametrize("within", [False, True], ids=["common.pt", "an object"])
def test_the_common_state_of_megatron(tmp_path: Path, within: bool) -> None:
    """Up to megatron-core 0.18 the common state has its own file; later it is another object."""
    folder = megatrons(tmp_path / "saved", within=within)
    assert (folder / "common.pt").exists() != within
    (part,) = read_parts(folder)
    assert part.facts["sharding"] == "fully_reshardable"
    assert part.scaler.state == "whole"
    assert "scale 512" in part.scaler.text


def test_files_of_ranks(tmp_path: Path) -> None:
    (part,) = read_parts(of_ranks(tmp_path / "saved"))
    assert part.kind == "shards"
    assert part.units[0].world_size == 2
    assert part.dtypes("params") == part.dtypes("exp_avg") == {"fp32": 2 * 12}
    assert part.scaler.state == "whole"
    assert "scale 1024" in part.scaler.text


def test_dtensors_count_once(tmp_path: Path) -> None:
    """A rank's file contains a DTensor's shard, and the mesh, which is no data."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1
    )
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        shard = torch.distributed.tensor.distribute_tensor(torch.randn(8, 4), mesh)
        folder = tmp_path / "saved"
        folder.mkdir()
        torch.save({"weight": shard}, folder / "model_world_size_1_rank_0.pt")
    finally:
        torch.distributed.destroy_process_group()
    (part,) = read_parts(folder)
    assert part.dtypes("params") == {"fp32": 32}
    assert not part.held.get("other")


def test_safetensors(tmp_path: Path) -> None:
    (part,) = read_parts(safetensors(tmp_path / "saved"))
    assert part.dtypes("params") == {"bf16": ELEMENTS, "fp32": 4}


def test_a_record_in_a_tensor(tmp_path: Path) -> None:
    (part,) = read_parts(with_record(tmp_path / "saved"))
    assert part.scaler.state == "whole"


@pytest.mark.parametrize("damage", [None, ("1024", "2048"), ("{", "")])
def test_a_record_in_a_file(tmp_path: Path, damage: tuple[str, str] | None) -> None:
    folder = distributed(tmp_path / "saved")
    file = save(folder, scaler())
    assert file.name == FILE_NAME
    if damage:
        file.write_text(file.read_text().replace(*damage))
    (part,) = read_parts(folder)
    assert part.scaler.state == ("damaged" if damage else "whole")


def test_the_models_of_the_last_step(tmp_path: Path) -> None:
    for step in (2, 10):
        for model in ("actor", "critic"):
            of_ranks(tmp_path / f"global_step_{step}" / model, 1)
    parts = read_parts(tmp_path)
    assert [(one.framework, one.subject) for one in parts] == [
        ("verl", "actor"),
        ("verl", "critic"),
    ]
    assert {one.path.parent.name for one in parts} == {"global_step_10"}
    (one,) = read_parts(tmp_path / "global_step_2" / "critic")
    assert (one.framework, one.subject) == ("verl", "critic")


@pytest.mark.parametrize(
    ("names", "framework"),
    [
        (("global_step_7", "policy"), "skyrl"),
        (("step_7", "policy", "weights", "iter_0000000"), "nemo-rl"),
        (("step-7",), "torchtitan"),
        (("somewhere",), ""),
    ],
)
def test_whose_it_is(tmp_path: Path, names: tuple[str, ...], framework: str) -> None:
    distributed(tmp_path.joinpath(*names))
    for depth in range(1, len(names) + 1):
        (part,) = read_parts(tmp_path.joinpath(*names[:depth]))
        assert part.framework == framework


# -- what no rule covers --------------------------------------------------------------------------

NUMBERS = torch.ones(6, 4)
STATE, MOMENTUM = "optimizer.state.weight", "optimizer.state.momentum_buffer.weight"


def one_rank(folder: Path, state: dict[str, Any], **extra: object) -> Path:
    """The files of a rank whose optimizer has this state, with ``extra`` in its extra state."""
    for file in of_ranks(folder, 1).iterdir():
        if file.name.startswith("optim"):
            torch.save({"state": {0: state}, "param_groups": [{"lr": NUMBERS}]}, file)
        elif extra and file.name.startswith("extra"):
            torch.save(extra, file)
    return folder


class Packed(torch.Tensor):
    """A tensor of fp32 that stores codes and a scale, as in the 8-bit optimizers of torchao."""

    @staticmethod
    def __new__(cls) -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, (64, 64), dtype=torch.float32)

    def __init__(self) -> None:
        self.codes, self.scale = torch.ones(64, 64).byte(), torch.ones(2)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        return "is_pinned" not in str(func) and args[0]


ADAM = {"step": torch.tensor(3.0), "exp_avg": NUMBERS, "exp_avg_sq": NUMBERS}


@pytest.mark.parametrize(
    ("write", "unknown"),
    [
        (partial(distributed, **{f"{STATE}.momentum_buffer": NUMBERS}), "state momentum_buffer"),
        (partial(distributed, **{f"{STATE}.max_exp_avg_sq": NUMBERS}), "state max_exp_avg_sq"),
        (partial(distributed, **{f"{STATE}.shampoo": {"a": 1}}), "state a"),
        (partial(distributed, **{f"{STATE}.exp_avg": NUMBERS.byte()}), "moments in uint8"),
        (partial(distributed, **{f"{STATE}.exp_avg": Packed()}), "moments in packed"),
        (partial(one_rank, state=ADAM | {"exp_avg": Packed()}), "moments in packed"),
        (
            partial(one_rank, state=ADAM | {"exp_avg": NUMBERS.to(torch.float8_e4m3fn)}),
            "moments in float8_e4m3fn",
        ),
        (
            partial(distributed, **{"optimizer.state.other.exp_avg": NUMBERS}),
            "48 values of exp_avg",
        ),
        (partial(distributed, **{"ema.weight": NUMBERS}), "copy of weights ema"),
        (partial(distributed, slow={"weights": {"weight": NUMBERS, "of": b"-"}}), "slow"),
        (partial(distributed, **{"train_state.ema": NUMBERS}), "train_state.ema"),
        (partial(one_rank, state={"momentum_buffer": NUMBERS}), "state momentum_buffer"),
        (partial(one_rank, state={"exp_avg": NUMBERS}), "24 values of exp_avg and 0"),
        (partial(one_rank, state=ADAM, ema={"weight": NUMBERS}), "ema.weight"),
        (partial(megatrons, **{MOMENTUM: NUMBERS}), "state momentum_buffer"),
        (partial(megatrons, within=True, **{"optimizer.soap/shard_0_1": {"a": 1}}), "state soap"),
        (partial(megatrons, within=True, **{"ema_state/shard_0_1": [NUMBERS]}), "ema_state"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_states_that_no_rule_covers(tmp_path: Path, write: Any, unknown: str) -> None:
    (part,) = read_parts(write(tmp_path / "saved"))
    assert any(unknown in name for name in part.unknown), part.unknown


@pytest.mark.parametrize(
    "name",
    [
        *("layer_wise_optimizer_0.pt", "optimizer.pt", "ema/model.safetensors", "ema.safetensors"),
        *("ema", "ema_world_size_1_rank_0.pt", "further/__0_0.distcp", "huggingface/optimizer.bin"),
    ],
)
def test_files_that_no_rule_covers(tmp_path: Path, name: str) -> None:
    of_ranks(tmp_path / "global_step_1" / "actor", 1)
    file = tmp_path / "global_step_1" / "actor" / name
    file.parent.mkdir(exist_ok=True)
    torch.save({"weight": NUMBERS}, file)
    (part,) = read_parts(tmp_path)
    assert len(part.unknown) == 1
    assert name.partition("_world")[0] in next(iter(part.unknown))


@pytest.mark.parametrize("write", [*KINDS.values(), partial(one_rank, state=ADAM)])
def test_files_that_are_known(tmp_path: Path, write: Any) -> None:
    """What the frameworks write beside weights and states, and links to directories."""
    step = tmp_path / "global_step_1"
    write(step / "kept")
    (step / "actor").symlink_to("kept")
    names = {
        "data.pt": "data loader",
        "dataloader/dataloader_dp_rank_0.pt": "data loader",
        "train_dataloader_math.pt": "data loader",
        "rng_state/rng_state_0.pth": "random numbers",
        "scheduler.pt": "schedule, counters",
        "trainer_state.pt": "schedule, counters",
        "train_state.pt": "schedule, counters",
        "replay_buffer.pt": "rollout's samples",
        "transfer_queue/0.bin": "rollout's samples",
        "actor/huggingface/tokenizer.json": "texts",
        "actor/huggingface/tokenizer.model": "tokenizer",
        "actor/huggingface/model-00001-of-00002.safetensors": "weights for Hugging Face",
        "actor/lora_adapter/adapter_model.bin": "weights for Hugging Face",
        "actor/.cache/anything": "",
    }
    for name in names:
        (step / name).parent.mkdir(exist_ok=True)
        (step / name).write_bytes(b"")
    (part,) = read_parts(tmp_path)
    assert part.unknown == {}
    assert f"not read: {', '.join(sorted({*names.values()} - {''}))}" in part.notes


# -- the command ----------------------------------------------------------------------------------

_WITHOUT_TORCH = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "rich"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
import importlib.util
own = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else own(name, *rest)
from precision_shim_tools.cli import main
main()
"""


@pytest.mark.parametrize("kind", KINDS)
def test_without_torch(tmp_path: Path, kind: str) -> None:
    """The base install lists a checkpoint's content, and reports that nothing can be resumed."""
    folder = KINDS[kind](tmp_path / "saved")
    done = python("-c", _WITHOUT_TORCH, "checkpoint", "--json", "--framework=verl", folder)
    assert done.stderr == ""
    found = json.loads(done.stdout)
    (part,) = found["parts"]
    assert part["components"]["params"]["elements"] > 0
    assert part["resume"]["verdict"] == "not here"
    assert done.returncode == 1


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", *map(str, arguments)])
    return int(ended.value.code or 0)


def test_options_that_make_no_sense(tmp_path: Path, capsys: Any) -> None:
    assert run(tmp_path, "--framework", "other") == 2
    known = "areal, miles, ms-swift, nemo-rl, roll, skyrl, slime, torchtitan, verl"
    assert f"allowed: {known}" in capsys.readouterr().err
    assert run(tmp_path, "--framwork", "verl") == 2
    assert ": --framwork verl; did you mean --framework?" in capsys.readouterr().err
    assert run(tmp_path, "--config", "adam_beta2") == 2
    assert "FIELD=VALUE" in capsys.readouterr().err
    assert run(tmp_path, "--config", "adam_beta2=high") == 2
    assert "'high' is no number. Write one, such as adam_beta2=1." in capsys.readouterr().err
    assert run(tmp_path) == 2
    assert "but nothing at all. Give the directory" in capsys.readouterr().err
    for name in ("a.txt", "config.json", "d.txt", "tokenizer.json"):
        (tmp_path / name).touch()
    assert run(tmp_path) == 2
    assert "but a.txt, config.json, d.txt and others. Give the directory" in capsys.readouterr().err


def test_errors_fit_the_terminal(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert run(tmp_path, "--config", "param_dtype=fp16") == 2
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) <= 60
    assert "did you mean precision?" in " ".join(" ".join(lines).split())


def test_a_field_that_the_installed_megatron_does_not_have(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import dataclasses\n@dataclasses.dataclass\nclass OptimizerConfig:\n"
    place = tmp_path / "megatron" / "core" / "optimizer" / "optimizer_config.py"
    place.parent.mkdir(parents=True)
    place.write_text(f"{source}    exp_avg_dtype: object = None\n")
    for folder in (place.parent, place.parent.parent):
        (folder / "__init__.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert run(tmp_path / "step-3", "--config", "exp_avg_dtyp=bf16") == 2
    said = capsys.readouterr().err
    assert "no field 'exp_avg_dtyp' here; did you mean exp_avg_dtype?" in said
    for text in ("exp_avg_dtype=bf16", "precision=fp16", "grad_reduce_in_fp32=true"):
        assert run(tmp_path / "step-3", "--config", text) == 2
        assert "no such directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("grad_reduce_in_fp32=0", False),
        ("grad_reduce_in_fp32=False", False),
        ("use_precision_aware_optimizer=1", True),
        ("exp_avg_dtype=bf16", "bf16"),
        ("adam_beta2=0.95", 0.95),
        ("adam_beta2=1", 1.0),
    ],
)
def test_what_the_config_says(text: str, value: Any) -> None:
    assert _config([text]) == {text.partition("=")[0]: value}


# -- files that cannot be read --------------------------------------------------------------------


def one_sentence(capsys: Any) -> str:
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.endswith(".")
    return line


@pytest.mark.parametrize("kind", KINDS)
def test_cut_off_anywhere(tmp_path: Path, capsys: Any, kind: str) -> None:
    folder = KINDS[kind](tmp_path / "saved")
    for file in sorted(folder.iterdir()):
        whole = file.read_bytes()
        if file.name == "metadata.json":
            continue
        for length in {0, 1, len(whole) // 3, len(whole) // 2, len(whole) - 1}:
            file.write_bytes(whole[:length])
            assert run(folder) == 2, (file.name, length)
            assert str(tmp_path) in one_sentence(capsys)
        file.write_bytes(whole)
    assert run(folder) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_chance(tmp_path: Path, capsys: Any, kind: str) -> None:
    """A randomly damaged file yields an answer or one sentence, and never a traceback."""
    folder = KINDS[kind](tmp_path / "saved")
    generator = torch.Generator().manual_seed(0)
    for file in sorted(folder.iterdir()):
        whole = file.read_bytes()
        for _ in range(8):
            broken = bytearray(whole)
            for at in torch.randint(0, len(whole), (4,), generator=generator).tolist():
                broken[at] = int(torch.randint(0, 256, (1,), generator=generator))
            file.write_bytes(broken)
            if run(folder) == 2:
                one_sentence(capsys)
            capsys.readouterr()
        file.write_bytes(whole)


@pytest.mark.parametrize("lost", [".metadata", "__0_0.distcp"])
def test_a_file_is_missing(tmp_path: Path, capsys: Any, lost: str) -> None:
    folder = megatrons(tmp_path / "saved")
    (folder / lost).unlink()
    assert run(folder) == 2
    assert lost in one_sentence(capsys)


def test_a_ranks_file_is_missing(tmp_path: Path, capsys: Any) -> None:
    folder = of_ranks(tmp_path / "saved")
    (folder / "optim_world_size_2_rank_1.pt").unlink()
    assert run(folder) == 2
    assert "optim_world_size_2_rank_1.pt: it is missing" in one_sentence(capsys)


def test_files_of_two_jobs(tmp_path: Path, capsys: Any) -> None:
    folder = of_ranks(tmp_path / "saved")
    (folder / "model_world_size_1_rank_0.pt").write_bytes(b"")
    assert run(folder) == 2
    assert "1 and 2 ranks" in one_sentence(capsys)
    (folder / "fsdp_config.json").write_text('{"world_size": 2}')  # of the last save
    (part,) = read_parts(folder)
    assert part.units[0].world_size == 2


def test_nothing_there(tmp_path: Path, capsys: Any) -> None:
    assert run(tmp_path / "nowhere") == 2
    assert "no such directory" in one_sentence(capsys)
    assert run(tmp_path) == 2
    assert "no checkpoint" in one_sentence(capsys)
    file = tmp_path / "notes.txt"
    file.write_text("no checkpoint")
    assert run(file) == 2
    assert "this is a file" in one_sentence(capsys)
    assert run(tmp_path, "--json") == 2
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_a_wrong_path_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    said = python(
        "-c",
        "import sys\n"
        "from precision_shim_tools.cli import main\n"
        "try:\n    main(['checkpoint', 'nowhere'])\n"
        "finally:\n    print('torch' in sys.modules)",
        cwd=tmp_path,
    )
    assert said.stdout.split() == ["False"]
    assert "no such directory" in said.stderr


def test_a_share_of_the_sample_is_whole_elements() -> None:
    ones = torch.ones(1000).numpy().tobytes()
    asked: list[int] = []
    tensors = [Tensor("fp32", 1000, (lambda most: (asked.append(most), ones)[1],))] * 3
    found = list(samples(tensors))
    assert all(torch.equal(value, torch.ones(1000)) for value in found)
    assert len(found) == 3
    assert {most % 8 for most in asked} == {0}


def test_tensors_are_read_from_an_archive_that_is_opened_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To open it for each tensor would parse the list of all tensors for each."""
    whole = torch.arange(100.0)
    torch.save({"whole": whole, "slice": whole[7:], "other": whole + 0.5}, tmp_path / "file.pt")
    tensors = dict(Archive(tmp_path / "file.pt").tensors())
    monkeypatch.setattr(zipfile, "ZipFile", None)
    found = {keys[0]: next(samples([tensor])).tolist() for keys, tensor in tensors.items()}
    assert found == {
        "whole": [*range(100)],
        "slice": [*range(7, 100)],
        "other": (whole + 0.5).tolist(),
    }


def test_another_programs_pickle(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    (tmp_path / "__0_0.distcp").write_bytes(b"")
    assert run(tmp_path) == 2
    assert "not the metadata" in one_sentence(capsys)


# -- pickles that would run code ------------------------------------------------------------------


class Harm:
    """An object whose unpickling creates a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


def test_metadata_that_would_run_code(tmp_path: Path, capsys: Any) -> None:
    folder = distributed(tmp_path / "saved")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = Harm(tmp_path / "done")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert run(folder, "--json") == 1
    assert json.loads(capsys.readouterr().out)["parts"][0]["components"]["params"]
    (folder / ".metadata").write_bytes(pickle.dumps(Harm(tmp_path / "done")))
    assert run(folder) == 2
    assert "not the metadata" in one_sentence(capsys)
    assert not (tmp_path / "done").exists()


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_other_files_that_would_run_code(tmp_path: Path, capsys: Any, protocol: int) -> None:
    harm = Harm(tmp_path / "done")
    folder = megatrons(tmp_path / "saved", extra=harm)  # extra is an object in a .distcp file
    torch.save({"content_metadata": harm, "optimizer": [harm]}, folder / "common.pt")
    (tmp_path / "done").unlink(missing_ok=True)  # copying the object ran the harmful code
    run(folder)
    ranks = of_ranks(tmp_path / "ranks", 1)
    for file in ranks.iterdir():
        content = {"state": {0: {"exp_avg": torch.ones(2), "harm": harm}}}
        torch.save(content, file, pickle_protocol=protocol)
    run(ranks)
    assert "Error" not in capsys.readouterr().err
    assert not (tmp_path / "done").exists()
