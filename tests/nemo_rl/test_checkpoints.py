"""NeMo-RL's checkpoints contain the loss scaler's state."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException

from precision_shim.errors import PrecisionShimWarning, ScalerOfAnotherSaveError
from precision_shim.scaling import FILE_NAME

from ..every_framework.checkpoint_doctor import FP16 as FP16_JOB
from ..every_framework.checkpoint_doctor import verdict
from ..every_framework.shim_warnings import ours
from ..processes.kill_points import beside_another_job, kill_points
from .support import batch, each_kind, loss_for, parameters, save, scaler_of
from .test_training import Times, figures, same


def train(one: Any, kind: str, seeds: range) -> list[Any]:
    return [figures(one.train(batch(seed=seed), loss_for(kind))) for seed in seeds]


def moments(one: Any) -> list[torch.Tensor]:
    states = one.optimizer.state_dict()["state"]
    return [
        value.full_tensor() if hasattr(value, "full_tensor") else value
        for state in states.values()
        for value in state.values()
    ]


@each_kind
def test_a_resumed_run_continues_bit_for_bit(kind, worker, shim, tmp_path: Path) -> None:
    shim(settings={"growth_interval": 3})
    with worker(kind, "float16") as one:
        one.train(batch(seed=9), Times(loss_for(kind), 1e30))  # an overflow: 65536 is halved
        assert train(one, kind, range(2)) == [([32768.0], [1.0])] * 2
        save(one, tmp_path)
        assert train(one, kind, range(2, 5)) == [([32768.0], [1.0])] + [([65536.0], [1.0])] * 2
        expected, states = parameters(one), moments(one)
    assert verdict(tmp_path, "nemo-rl") == "exact"
    with worker(kind, "float16", paths=tmp_path) as one:
        scaler = scaler_of(one)
        assert (scaler.get_scale(), scaler._get_growth_tracker()) == (32768.0, 2)
        assert (scaler.counter.steps, scaler.counter.skipped) == (3, 1)
        assert train(one, kind, range(2, 5)) == [([32768.0], [1.0])] + [([65536.0], [1.0])] * 2
        assert same(expected, parameters(one))
        assert all(torch.equal(*pair) for pair in zip(states, moments(one), strict=True))


@pytest.mark.parametrize("low", ["float32", "bfloat16"])
def test_a_resume_that_rounds_is_told(worker, shim, tmp_path: Path, low: str) -> None:
    shim()
    with worker("v1", "bfloat16") as one:
        one.train(batch(), loss_for("v1"))
        save(one, tmp_path)
    job = worker("v1", "bfloat16", tmp_path, hf_config_overrides={"dtype": low})
    with ours() as said, job as two:
        dtype = next(two.model.parameters()).dtype
    if dtype is not getattr(torch, low):
        pytest.skip("this NeMo-RL loads fp32 parameters whatever the key says")
    told = [text for text in said if "rounds its exp_avg and exp_avg_sq from fp32" in text]
    assert len(told) == (low == "bfloat16"), said


@pytest.mark.slow
def test_load_checkpoint_restores_the_scaler_too(worker, shim, tmp_path: Path) -> None:
    shim(settings={"growth_interval": 1, "loss_scale_init": 1024})
    with worker("v2", "float16") as one:
        train(one, "v2", range(2))
        save(one, tmp_path)
        train(one, "v2", range(2, 4))
        assert scaler_of(one).get_scale() == 1024.0 * 2**4
        one.load_checkpoint(str(tmp_path / "weights"), str(tmp_path / "optimizer"))
        assert scaler_of(one).get_scale() == 1024.0 * 2**2


def test_without_the_optimizer_no_scaler_is_saved(worker, shim, tmp_path: Path) -> None:
    shim()
    with worker("v2", "float16") as one:
        save(one, tmp_path, optimizer=False)
    assert not list(tmp_path.rglob(FILE_NAME))


def test_a_checkpoint_without_scaler_state_loads_with_one_warning(
    worker, shim, tmp_path: Path
) -> None:
    with worker("v1", "float16") as one:
        one.train(batch(), loss_for("v1"))
        save(one, tmp_path)
        states = moments(one)
    shim()
    assert verdict(tmp_path, "nemo-rl", FP16_JOB) == "starts anew"
    stack = contextlib.ExitStack()
    with pytest.warns(PrecisionShimWarning, match="no loss scaler state at") as caught:
        one = stack.enter_context(worker("v1", "float16", tmp_path))
    with stack:
        assert scaler_of(one).get_scale() == 65536.0
        assert all(torch.equal(*pair) for pair in zip(states, moments(one), strict=True))
    assert len([one for one in caught if issubclass(one.category, PrecisionShimWarning)]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["v1", "v2"])
def test_a_checkpoint_of_the_shim_loads_without_it(kind, worker, shim, tmp_path: Path) -> None:
    import precision_shim

    shim()
    with worker(kind, "float16") as one:
        one.train(batch(), loss_for(kind))
        save(one, tmp_path)
        expected, states = parameters(one), moments(one)
    precision_shim.uninstall()
    assert verdict(tmp_path, "nemo-rl") == "starts anew"
    with worker(kind, "float16", tmp_path) as one:
        assert same(expected, parameters(one))
        assert all(torch.equal(*pair) for pair in zip(states, moments(one), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "strict"), [("v1", False), ("v2", True)])
def test_a_directory_that_is_saved_again_without_the_shim(
    kind, worker, shim, tmp_path: Path, strict: bool
) -> None:
    """A killed save leaves a temporary directory, into which the next save writes."""
    import precision_shim

    shim(settings={"growth_interval": 1})
    with worker(kind, "float16") as one:
        train(one, kind, range(2))
        save(one, tmp_path)
    record = json.loads((tmp_path / "optimizer" / FILE_NAME).read_text())
    weights = {Path(name).suffix for name in record["files"] if name.startswith("../weights/")}
    assert weights == ({"", ".distcp"} if kind == "v1" else {".safetensors"})
    assert len(record["files"]) == (4 if kind == "v1" else 3)
    precision_shim.uninstall()
    with worker(kind, "float16") as one:
        train(one, kind, range(3))
        save(one, tmp_path)
    shim(strict=strict)
    assert verdict(tmp_path, "nemo-rl", FP16_JOB) == ("refused" if strict else "starts anew")
    stack = contextlib.ExitStack()
    if strict:
        with (
            pytest.raises(ScalerOfAnotherSaveError, match="is of another save"),
            worker(kind, "float16", tmp_path),
        ):
            pass
        return
    with pytest.warns(PrecisionShimWarning, match="is of another save than the files beside it"):
        one = stack.enter_context(worker(kind, "float16", tmp_path))
    with stack:
        assert scaler_of(one).get_scale() == 65536.0
        assert scaler_of(one).counter.steps == 0


def loaded(one: Any, place: Path, states: list[Any]) -> str:
    """How a load ends: with the scaler's state told as lost, or as whole states."""
    predicted = verdict(place, "nemo-rl", FP16_JOB)
    with ours() as said:
        try:
            one.load_checkpoint(str(place / "weights"), str(place / "optimizer"))
        except (RuntimeError, CheckpointException):
            return "refused by NeMo-RL"
    assert predicted == ("starts anew" if said else "exact")
    return "told" if said else str(states.index(whole(one)))


def whole(one: Any) -> list[Any]:
    scaler = scaler_of(one)
    tensors = [*parameters(one).values(), *moments(one)]
    return [scaler.get_scale(), scaler.counter.steps, *(tensor.tolist() for tensor in tensors)]


def saved(one: Any, kind: str, place: Path) -> list[Any]:
    train(one, kind, range(2))
    save(one, place)
    return whole(one)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["v1", "v2"])
def test_killed_at_any_file_operation(kind, worker, shim, tmp_path: Path) -> None:
    """NeMo-RL writes the weights and then the optimizer's states into directories that exist."""
    shim(settings={"growth_interval": 1})
    target = tmp_path / "target"
    with worker(kind, "float16") as one:
        before = saved(one, kind, target)
        with kill_points(target, tmp_path / "copies") as points:
            after = saved(one, kind, target)
        ends = [loaded(one, place, [before, after]) for place in points]
    assert {"0", "told", "1"} <= {*ends} <= {"0", "told", "1", "refused by NeMo-RL"}
    assert ends[-1] == "1"


@pytest.mark.slow
def test_another_job_saves_into_the_directories_meanwhile(worker, shim, tmp_path: Path) -> None:
    shim(settings={"growth_interval": 1})
    target, other, own = (tmp_path / name for name in ("target", "other", "own"))
    ends = set()
    with worker("v2", "float16") as one:
        states = [saved(one, "v2", place) for place in (other, own)]
        for place in beside_another_job(target, other, lambda: save(one, target)):
            ends.add(loaded(one, place, states))
            one.load_checkpoint(str(own / "weights"), str(own / "optimizer"))
    assert {"1", "told"} <= ends <= {"0", "1", "told", "refused by NeMo-RL"}


@pytest.mark.slow
def test_files_of_an_earlier_save_on_more_ranks(worker, shim, tmp_path: Path) -> None:
    shim(strict=True)
    with worker("v1", "float16") as one:
        train(one, "v1", range(2))
        save(one, tmp_path)
        state = whole(one)
    for directory in ("weights", "optimizer"):
        (tmp_path / directory / "__1_0.distcp").write_bytes(b"left over")
    assert verdict(tmp_path, "nemo-rl", FP16_JOB) == "exact"
    with worker("v1", "float16", tmp_path) as one:
        assert whole(one) == state


@pytest.mark.slow
def test_a_save_while_each_step_was_skipped_counts_no_step(worker, shim, tmp_path: Path) -> None:
    """torch's distributed checkpoint makes missing states by a step, and counts it."""
    shim()

    def skips(one: Any) -> None:
        one.train(batch(seed=9), Times(loss_for("v2"), 1e30))

    ends = []
    with worker("v2", "float16") as one:
        skips(one)
        train(one, "v2", range(2))
        ends.append((parameters(one), moments(one)))
    with worker("v2", "float16") as one:
        skips(one)
        save(one, tmp_path)
        train(one, "v2", range(2))
        ends.append((parameters(one), moments(one)))
    with worker("v2", "float16", paths=tmp_path) as one:
        train(one, "v2", range(2))
        ends.append((parameters(one), moments(one)))
    (expected, states), *others = ends
    for found, kept in others:
        assert same(expected, found)
        assert all(torch.equal(*pair) for pair in zip(states, kept, strict=True))
