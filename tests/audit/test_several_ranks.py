"""The audit over ranks: dense and expert parts of Megatron, FSDP2's shards, unequal ranks."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from ..processes.rank_server import Ranks

HAS_MEGATRON = importlib.util.find_spec("megatron") is not None
needs_megatron = pytest.mark.skipif(not HAS_MEGATRON, reason="megatron-core is not installed")


def codes(audit: dict[str, Any]) -> set[str]:
    return {one["code"] for one in audit["problems"]}


@pytest.fixture(scope="module")
def megatron(run_ranks: Ranks) -> list[Any]:
    return run_ranks("megatron")


@needs_megatron
def test_honest_builds_have_no_problem_and_their_own_data_parallel_groups(
    megatron: list[Any],
) -> None:
    for rank in megatron:
        assert len(rank["honest"]) == 6
        for name, (before, after) in rank["honest"].items():
            assert (before["problems"], after["problems"]) == ([], []), name
            assert (before["complete"], after["complete"]) == (False, True)
            assert after["ranks"] == {"compared": 2, "differ": []}
            parts = {one["name"]: one for one in after["parts"]}
            if name.startswith("dense"):
                assert {n: one["data_parallel_size"] for n, one in parts.items()} == {"model": 2}
            else:
                sizes = {n: one["data_parallel_size"] for n, one in parts.items()}
                assert sizes == {"dense": 2, "experts": 1}
                assert not parts["experts"]["components"]["exp_avg"]["sharded"]
            for one in parts.values():
                if one["data_parallel_size"] == 2:
                    assert one["components"]["exp_avg"]["sharded"]
                    assert 0 < one["owned"] < one["parameters"]


@needs_megatron
def test_measure_bytes_tells_dense_and_experts_apart(megatron: list[Any]) -> None:
    for rank in megatron:
        assert rank["measured"] == {"dense": {"model": 2}, "experts": {"dense": 2, "experts": 1}}


@needs_megatron
def test_what_the_ranks_own_is_all_of_the_model(megatron: list[Any]) -> None:
    for name in megatron[0]["honest"]:
        audits = [rank["honest"][name][1] for rank in megatron]
        for parts in zip(*(one["parts"] for one in audits), strict=True):
            groups = len(audits) // parts[0]["data_parallel_size"]
            assert sum(one["owned"] for one in parts) == groups * parts[0]["parameters"]


@needs_megatron
def test_each_planted_problem_is_found_in_each_part(megatron: list[Any]) -> None:
    for rank in megatron:
        for name, audit in rank["planted"].items():
            kind, _, planted = name.partition(": ")
            code = planted.partition(",")[0]
            parts = {one["part"] for one in audit["problems"] if one["code"] == code}
            whole = {"dense"} if "of fp32 weights" in planted else {"dense", "experts"}  # norms
            assert parts == ({"model"} if kind == "dense" else whole), name


@needs_megatron
def test_its_bytes_over_the_ranks_are_those_of_all_live_tensors(megatron: list[Any]) -> None:
    for rank in megatron:
        assert len(rank["held"]) == 8
        for name, (held, audit) in rank["held"].items():
            assert audit["totals"]["allocated"] == held, name


@needs_megatron
def test_a_rank_that_differs_is_named_on_all(run_ranks: Ranks) -> None:
    for audit, ok in run_ranks("differing"):
        assert not ok
        assert audit["ranks"] == {"compared": 2, "differ": [1]}
        assert codes(audit) == {"rank-differs"}
        assert (
            "model: master is int16 on rank 0 and fp32 on rank 1" in audit["problems"][0]["message"]
        )


def test_a_rank_that_cannot_be_audited_lets_nobody_wait(run_ranks: Ranks) -> None:
    first, last = run_ranks("failing")
    assert first[0].startswith("audit(group=...): rank 1 could not be audited")
    assert "builtins.str" in first[0]
    assert last[0].startswith("audit(optimizer=...): builtins.str")
    assert first[1] == ""
    assert "rank 1 is not in the group" in last[1]


@pytest.fixture(scope="module")
def fsdp(run_ranks: Ranks) -> list[Any]:
    pytest.importorskip("torch.distributed.fsdp", reason="FSDP2 needs torch >= 2.6")
    return run_ranks("fsdp")


def test_fsdp2_is_read_by_its_shares(fsdp: list[Any]) -> None:
    for rank in fsdp:
        for name in ("fp32", "bf16", "fp16"):
            (part,) = rank[name]["after"]["parts"]
            assert part["data_parallel_size"] == 2
            assert part["owned"] == rank[name]["shares"]
            assert part["components"]["params"]["dtypes"] == [name]
            assert part["components"]["exp_avg"]["dtypes"] == [name]
            assert part["components"]["exp_avg"]["sharded"]
            assert part["components"]["params"]["sharded"]
            size = 4 if name == "fp32" else 2
            assert part["components"]["exp_avg_sq"]["bytes"] == size * part["owned"]
            assert part["components"]["frozen"]["bytes"] > 0
            (early,) = rank[name]["before"]["parts"]
            assert early["components"]["exp_avg"]["state"] == "later"
            assert early["components"]["exp_avg"]["dtypes"] == [name]
    parts = [rank["fp32"]["after"]["parts"][0] for rank in fsdp]
    assert sum(one["owned"] for one in parts) == parts[0]["parameters"] == 8 * 15 + 15 * 3 + 3


def test_fsdp2_notes_what_no_config_contradicts(fsdp: list[Any]) -> None:
    for rank in fsdp:
        notes = {
            name: {one["code"] for one in rank[name]["after"]["notes"]}
            for name in ("fp32", "bf16", "fp16")
        }
        assert notes == {
            "fp32": set(),
            "bf16": {"no-master", "second-moment-stuck"},
            "fp16": {"no-master", "scaler-missing"},
        }
        with_scaler = rank["fp16 with a scaler"]
        assert {one["code"] for one in with_scaler["notes"]} == {"no-master"}
        assert with_scaler["parts"][0]["scaler"] == "LossScaler"
        assert all(rank[name]["after"]["ok"] for name in notes)


def test_fsdp2_against_what_is_expected(fsdp: list[Any]) -> None:
    for rank in fsdp:
        (problem,) = rank["expected"]["problems"]
        assert problem["code"] == "unexpected-dtype"
        assert (problem["component"], problem["expected"], problem["found"]) == (
            "exp_avg",
            "bf16",
            "fp32",
        )


def test_fsdp2_gathered_parameters_are_not_counted_as_more(fsdp: list[Any]) -> None:
    for rank in fsdp:
        after, gathered = rank["fp32"]["after"]["parts"][0], rank["gathered"]["parts"][0]
        for name in ("parameters", "owned"):
            assert gathered[name] == after[name]
        assert gathered["components"]["master"]["state"] == "none"


def test_fsdp2_a_rank_without_a_share_is_not_unlike_the_others(fsdp: list[Any]) -> None:
    for rank in fsdp:
        audit = rank["one row"]
        assert audit["problems"] == []
        assert audit["ranks"] == {"compared": 2, "differ": []}
        components = audit["parts"][0]["components"]
        for name in ("params", "exp_avg", "exp_avg_sq"):
            assert components[name]["dtypes"] == ["bf16", "fp32"]
    assert sorted(rank["one row"]["parts"][0]["owned"] for rank in fsdp) == [32, 40]


def test_fsdp2_a_state_of_one_parameter_on_one_rank(fsdp: list[Any]) -> None:
    for rank in fsdp:
        assert rank["differs"]["ranks"] == {"compared": 2, "differ": [1]}
        assert codes(rank["differs"]) == {"rank-differs"}


def test_hybrid_shards_are_counted_without_their_copies(run_ranks: Ranks) -> None:
    pytest.importorskip("torch.distributed.fsdp", reason="FSDP2 needs torch >= 2.6")
    for rank in run_ranks("hybrid"):
        for name, owned, shards, held in (("2x1", 72, 1, "whole"), ("1x2", 36, 2, "1/2")):
            (part,) = rank[name]["parts"]
            assert (part["data_parallel_size"], part["shards"]) == (2, shards)
            assert (part["parameters"], part["owned"]) == (72, owned)
            assert part["components"]["exp_avg"]["sharded"] is (shards > 1)
            (row,) = (row for row in rank[f"{name} table"].splitlines() if "exp_avg_sq" in row)
            assert held in row.split()


@pytest.fixture(scope="module")
def flat(run_ranks: Ranks) -> list[Any]:
    return run_ranks("flat")


def test_fsdp1s_padding_is_not_counted(flat: list[Any]) -> None:
    for name in ("padded", "padded originals"):
        parts = [rank[name]["parts"][0] for rank in flat]
        assert [part["parameters"] for part in parts] == [135, 135]
        assert sum(part["owned"] for part in parts) == 135
        for part in parts:
            for component in ("params", "exp_avg", "exp_avg_sq"):
                assert part["components"][component]["bytes"] == 4 * part["owned"], component


def test_each_rank_has_all_step_counts(flat: list[Any]) -> None:
    """And a share of the momentum of SGD, which the row ``other`` has, too."""
    for rank in flat:
        for name, held in (("AdamW", "whole"), ("SGD", "1/2")):
            (row,) = (row.split() for row in rank[name].splitlines() if " other " in row)
            assert held in row, name


def test_fsdp1_is_read_by_its_shards(flat: list[Any]) -> None:
    for rank in flat:
        for name, shards in (("flat", 2), ("original", 2), ("not sharded", 1)):
            audit = rank[name]
            assert (audit["ok"], audit["complete"]) == (True, True), name
            (part,) = audit["parts"]
            assert (part["data_parallel_size"], part["shards"]) == (2, shards), name
            assert (part["parameters"], part["owned"]) == (144, 144 / shards), name
            for component in ("params", "exp_avg"):
                assert part["components"][component]["sharded"] is (shards == 2), name
                assert part["components"][component]["bytes"] == 4 * part["owned"], name
