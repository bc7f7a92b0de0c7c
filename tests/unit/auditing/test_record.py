"""The text and the figures of an audit for people."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import precision_shim
from precision_shim.auditing import files
from precision_shim.auditing.record import Audit, Finding
from precision_shim_tools.updates import lost


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


def updates(groups: int, **weights: Any) -> dict[str, Any]:
    count = {"dtype": "bf16", "updates": 100, "lost": 60, **weights}
    one = {"lr": 1e-6, "weights": count, "exp_avg_sq": None, "rollout": None}
    return {"step": 50, "groups": [{"group": number, **one} for number in range(groups)]}


def test_updates_of_more_groups_than_a_table_has_room_for() -> None:
    lines = list(lost.lines(updates(8)))
    assert lines[0] == "updates lost to rounding, step 50:"
    assert lines[1] == "  group 0, lr 1e-06: weights 60.0% (bf16), rollout not measured"
    assert len(lines) == 9
    assert list(lost.lines(updates(10)))[9:] == ["  and 2 more groups"]


@pytest.mark.parametrize(
    ("dtype", "component", "remedy"),
    [
        ("bf16", "params", "use an optimizer with masters"),
        ("fp32", "params", "so that no dtype helps"),
        ("bf16+int16", "master", "so that no dtype helps"),
        ("bf16, fp32", "params", "Keep the bf16 weights in fp32"),
    ],
)
def test_a_note_of_lost_updates(dtype: str, component: str, remedy: str) -> None:
    ((group, fields),) = lost.findings(updates(1, dtype=dtype), "model", "verl 1.0")
    assert group == 0
    assert fields[:5] == ("updates-lost", "model", component, "at most 50% lost", "60.0% lost")
    assert fields[5].startswith(
        "verl 1.0, model, parameter group 0 (lr 1e-06): 60.0% of the updates of the stored "
        f"weights ({dtype}) were rounded away at step 50, expected at most 50%: "
    )
    assert remedy in fields[5]


def test_lost_updates_of_fp32_masters_are_no_lost_updates_of_the_parameters() -> None:
    ((_, fields),) = lost.findings(updates(1, dtype="fp32"), "model", "verl 1.0", ["fp32"])
    assert fields[2] == "master"


@pytest.mark.parametrize(("count", "lost_ones"), [(100, 50), (0, 0)])
def test_half_of_them_and_none_are_no_note(count: int, lost_ones: int) -> None:
    assert not list(lost.findings(updates(1, updates=count, lost=lost_ones), "model", ""))


def test_a_group_without_a_note_does_not_hide_the_next() -> None:
    both = updates(2)
    both["groups"][0] = {**both["groups"][0], "weights": {"dtype": "bf16", "updates": 9, "lost": 0}}
    assert [group for group, _ in lost.findings(both, "model", "")] == [1]


def group(elements: int, sampled: int, **counts: tuple[str, int, int]) -> dict[str, Any]:
    kinds = {name: lost.count(*counts.get(name, ("", 0, 0))) for name in lost.METRICS}
    return {"group": 0, "lr": 1e-6, "elements": elements, "sampled": sampled, **kinds}


def figures(*groups: dict[str, Any]) -> dict[str, Any]:
    return lost.describe(50, 10, list(groups))


def test_figures_as_data_and_as_metrics() -> None:
    # A tenth of the first group was read, so each of its updates counts ten times.
    sampled = group(1000, 100, weights=("bf16", 100, 50))
    whole = group(100, 100, weights=("fp32", 100, 0), exp_avg_sq=("bf16", 4, 1))
    one = figures(sampled, whole)
    assert one == {
        "step": 50,
        "every": 10,
        "weights": 500 / 1100,
        "exp_avg_sq": 0.25,
        "rollout": None,
        "groups": [sampled, whole],
    }
    assert whole["exp_avg_sq"] == {"dtype": "bf16", "updates": 4, "lost": 1}
    assert lost.metrics([one, figures(whole)], "actor/") == {
        "actor/updates_lost": 500 / 1200,
        "actor/updates_lost_exp_avg_sq": 0.25,
    }
    assert lost.brief(one) == (
        "updates lost to rounding at step 50: stored weights 45.5%, second moment 25.0%"
    )


def test_figures_without_an_update() -> None:
    nothing = figures(group(10, 10, weights=("bf16", 0, 0)))
    assert lost.share([nothing], "weights") is None
    assert lost.metrics([nothing]) == {}
