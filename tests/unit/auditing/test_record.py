"""The text and the figures of an audit for people."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import precision_shim
from precision_shim.auditing import files
from precision_shim.auditing.record import Audit, Finding, updates_line
from precision_shim.auditing.rules import lost_updates


@pytest.fixture
def audit() -> Audit:
    model = torch.nn.Linear(4, 4).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    # Step counters and the allocator's figures depend on torch and on the machine.
    found = precision_shim.audit(model, optimizer, scaler=torch.amp.GradScaler("cpu"))
    return replace(found, framework="torch", totals={"bytes": 208, "host": 1000})


def test_the_table(audit: Audit) -> None:
    lines = str(audit).splitlines()
    assert lines[:5] == [
        "audit of torch, rank 0 of 1: ok",
        "",
        "model: AdamW, 20 parameters, 20 owned, data parallel 1, scaler GradScaler",
        "  component    dtypes  B/param  bytes  allocated  held   on   state",
        "  params       bf16       2.00     40         40  whole  cpu  live",
    ]
    (other,) = (line for line in lines if line.startswith("  other "))
    assert other.split() == ["other", "fp32", "8", "8", "whole", "cpu", "live"]
    (together,) = (line for line in lines if line.startswith("  together "))
    assert together.split() == ["together", "8.00", "168", "168"]
    assert lines[-5:] == [
        "",
        "total: bytes 208, host 1,000",
        "",
        "notes",
        f"  no-master: {audit.notes[0].message}",
    ]


def test_the_table_of_several_ranks_with_problems(audit: Audit) -> None:
    problem = Finding("main-grads-dtype", "model", "grad_buckets", "fp32", "bf16", "it is so")
    one = replace(audit, problems=(problem,), ranks={"compared": 4, "differ": [1, 3]})
    assert one.headline == "torch, rank 0 of 1: 1 problem"
    assert "ranks compared: 4, that differ: 1, 3" in str(one).splitlines()
    assert "  main-grads-dtype: it is so" in str(one).splitlines()
    alike = replace(
        audit, subject="actor", problems=(problem,) * 2, ranks={"compared": 4, "differ": []}
    )
    assert alike.headline == "torch actor, rank 0 of 1: 2 problems"
    assert "ranks compared: 4, that differ: none" in str(alike).splitlines()


def test_one_line(audit: Audit) -> None:
    held = "bf16 parameters, bf16/bf16 moments, GradScaler"
    assert audit.brief() == f"{held}; no problems; notes: no-master"
    (part,) = audit.parts
    several = replace(audit, parts=(part, replace(part, name="experts", scaler=None)), notes=())
    assert several.brief() == f"model: {held}; experts: {held[:-12]}; no problems"


def test_one_line_of_a_model_alone() -> None:
    alone = precision_shim.audit(torch.nn.Linear(2, 2), None)
    assert alone.brief() == "fp32 parameters; no problems"


def test_the_file_of_an_audit(audit: Audit, tmp_path: Path) -> None:
    one = replace(audit, framework="a b/c", subject="", rank=3, world_size=4)
    assert files.stem(one) == "a-b-c.optimizer.model"
    path = files.write(tmp_path / "new", "stem", one)
    assert path == tmp_path / "new" / "stem.rank3.audit.json"
    assert path.stat().st_mode & 0o777 == 0o644
    assert [path] == list(path.parent.iterdir())
    assert list(files.read_audits(path.parent)) == [(path, one)]


def figures(share: float | None, stored: str = "bf16") -> dict[str, Any]:
    dtypes = {"weights": stored, "exp_avg_sq": "bf16"}
    return {"step": 50, "every": 10, "weights": share, "exp_avg_sq": 0.25, "dtypes": dtypes}


@pytest.mark.parametrize(
    ("stored", "remedy"),
    [
        ("bf16", "use an optimizer with masters"),
        ("bf16, fp32", "use an optimizer with masters"),
        ("fp32", "so that no dtype helps"),
        ("bf16+int16", "so that no dtype helps"),
    ],
)
def test_a_note_of_lost_updates(stored: str, remedy: str) -> None:
    (note,) = lost_updates(figures(0.6, stored), "model", "verl 1.0, model")
    assert (note.code, note.part, note.expected) == ("updates-lost", "model", "at most 50% lost")
    assert note.message.startswith(
        f"verl 1.0, model: 60.0% of the updates of the stored weights ({stored}) were rounded away "
        "at step 50, expected at most 50% lost: "
    )
    assert remedy in note.message


@pytest.mark.parametrize("share", [0.5, None])
def test_half_of_them_and_none_are_no_note(share: float | None) -> None:
    assert not list(lost_updates(figures(share), "model", ""))


def test_a_line_of_lost_updates() -> None:
    told = "updates lost to rounding at step 50: stored weights 40.0% (bf16), second moment 25.0%"
    assert updates_line(figures(0.4)) == f"{told} (bf16)"
    assert "stored weights" not in updates_line(figures(None))
