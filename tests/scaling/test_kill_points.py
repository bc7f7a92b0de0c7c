"""``kill_points`` leaves out most writes into a file: none of them leaves a readable file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ..processes import kill_points


def test_a_file_of_torchs_is_unreadable_until_its_end_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kill_points, "_EVERY", 1)
    states: dict[str, Any] = {str(one): torch.ones(one) for one in range(5)}
    folder = tmp_path / "saved"
    folder.mkdir()
    with kill_points.kill_points(folder, tmp_path / "copies") as points:
        torch.save({"state": states, "groups": [{"lr": 1e-3}]}, folder / "optim.pt")
    *cut, whole = (one / "optim.pt" for one in points if (one / "optim.pt").exists())
    assert len(cut) > 50
    assert torch.load(whole).keys() == {"state", "groups"}
    for one in cut:
        with pytest.raises((EOFError, RuntimeError)):
            torch.load(one)
