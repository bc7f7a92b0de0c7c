"""What the doctor says of a torch optimizer's states, beside a real load by torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from precision_shim.process import settings
from precision_shim_tools.checkpoint import prediction
from precision_shim_tools.checkpoint.prediction import Here
from precision_shim_tools.checkpoint.report import Examined, examine

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def any_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frameworks that are not installed here could resume all the same."""
    monkeypatch.setattr(prediction, "_is_installed", lambda framework: True)


def trained(*dtypes: torch.dtype) -> tuple[torch.nn.ParameterList, torch.optim.AdamW]:
    """Parameters of one size in these dtypes, after a step."""
    torch.manual_seed(0)
    model = torch.nn.ParameterList(torch.randn(4, 4).to(dtype) for dtype in dtypes)
    optimizer = torch.optim.AdamW(model.parameters(), fused=False)
    for parameter in model:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def cast(optimizer: torch.optim.AdamW, moments: torch.dtype, step: torch.dtype) -> None:
    for state in optimizer.state.values():
        state["step"] = state["step"].to(step)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.randn(4, 4).square().to(moments)


def of_rank(folder: Path, weights: Any, states: Any, *, named: bool) -> Examined:
    """The verdict on a rank's files, whose states have their parameters' names or numbers."""
    if named:  # as in torch's get_optimizer_state_dict
        states = {**states, "state": {f"layer.{key}": one for key, one in states["state"].items()}}
        weights = {f"layer.{key}": one for key, one in weights.items()}
    folder.mkdir()
    torch.save(weights, folder / "model_world_size_1_rank_0.pt")
    torch.save(states, folder / "optim_world_size_1_rank_0.pt")
    torch.save({"lr_scheduler": {}}, folder / "extra_state_world_size_1_rank_0.pt")
    return verdict(folder, "verl")


def verdict(folder: Path, framework: str) -> Examined:
    (found,) = examine(folder, Here(False, settings.resolve()), framework)
    return found


@pytest.mark.parametrize("named", [True, False], ids=["names", "numbers"])
@pytest.mark.parametrize(
    ("dtypes", "moments", "step"),
    [
        ((FP32, BF16), None, FP32),
        ((FP32, BF16), FP32, FP32),
        ((BF16, FP32, BF16), BF16, FP32),
        ((FP32, FP32), BF16, FP32),
        ((FP32, FP32), None, BF16),
        ((BF16, BF16), None, FP16),
    ],
    ids=str,
)
def test_each_state_is_judged_with_its_own_parameter(
    tmp_path: Path, named: bool, dtypes: Any, moments: Any, step: torch.dtype
) -> None:
    model, optimizer = trained(*dtypes)
    if moments is not None:
        cast(optimizer, moments, step)
    else:
        for state in optimizer.state.values():
            state["step"] = state["step"].to(step)
    found = of_rank(tmp_path / "saved", model.state_dict(), optimizer.state_dict(), named=named)
    _, resumed = trained(*dtypes)
    resumed.load_state_dict(optimizer.state_dict())
    pairs = zip(optimizer.state.values(), resumed.state.values(), strict=True)
    same = all(one[name].dtype is other[name].dtype for one, other in pairs for name in one)
    assert found.outcome.exact == (same and step is FP32), found.outcome
    assert found.outcome.exact or found.outcome.verdict == "misread"


def test_what_the_numbers_do_not_tell(tmp_path: Path) -> None:
    """A buffer before a parameter makes the numbers those of other tensors."""
    model, optimizer = trained(BF16, BF16)
    buffer, moments = torch.ones(5), optimizer.state_dict()
    of_another = {"buffer": buffer, **model.state_dict()}
    found = of_rank(tmp_path / "one", of_another, moments, named=False)
    assert found.outcome.verdict == "not known"
    after = {**model.state_dict(), "buffer": buffer}
    assert of_rank(tmp_path / "two", after, moments, named=False).outcome.exact
    cast(optimizer, FP32, FP32)
    found = of_rank(tmp_path / "three", after, optimizer.state_dict(), named=False)
    assert found.outcome.verdict == "misread"


@pytest.mark.filterwarnings("ignore")  # no process group
@pytest.mark.parametrize("framework", ["torchtitan", "nemo-rl"])
def test_distributed_checkpoints(tmp_path: Path, framework: str) -> None:
    kept: dict[str, Any] = {}
    for name, dtype in {"a": FP32, "b": BF16}.items():
        kept[f"model.{name}.weight"] = torch.ones(4, 4, dtype=dtype)
        for state in ("exp_avg", "exp_avg_sq"):
            kept[f"optimizer.state.{name}.weight.{state}"] = torch.ones(4, 4, dtype=dtype)
        kept[f"optimizer.state.{name}.weight.step"] = torch.tensor(3.0)
    dcp.save(kept, checkpoint_id=tmp_path / "own")
    assert verdict(tmp_path / "own", framework).outcome.exact
    kept["optimizer.state.b.weight.exp_avg_sq"] = torch.ones(4, 4)
    dcp.save(kept, checkpoint_id=tmp_path / "other")
    expected = "misread" if framework == "torchtitan" else "not known"
    assert verdict(tmp_path / "other", framework).outcome.verdict == expected


@pytest.mark.parametrize("groups", [True, False], ids=["before its first step", "without groups"])
def test_an_optimizer_without_states(tmp_path: Path, groups: bool) -> None:
    """A job may save after steps that were all skipped."""
    model, _ = trained(FP32)
    optimizer = torch.optim.AdamW(model.parameters())
    states = optimizer.state_dict() if groups else {}
    found = of_rank(tmp_path / "saved", model.state_dict(), states, named=False)
    assert found.outcome.verdict == ("exact" if groups else "starts anew")
