"""FSDP2 in fp16 over gloo resumes bit for bit, and a fault on one rank reaches all ranks."""

from __future__ import annotations

import itertools
import json

import pytest

from precision_shim.scaling import FILE_NAME, LossScaler, ScalerSettings, load

from ..processes.rank_server import serving

pytest.importorskip("torch.distributed.fsdp", reason="FSDP2 needs torch >= 2.6")


run_ranks = serving("tests.scaling.ranks")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoint")


@pytest.fixture(scope="module")
def halves(run_ranks, checkpoint):
    """The results of 20 steps in one process, and of two processes with 10 steps each."""
    first = run_ranks("first_half", folder=checkpoint)
    second = run_ranks("second_half", folder=checkpoint)
    return first, second


EXACT = ("parameters", "states", "scale", "growth_tracker", "counter")


def test_both_halves_overflow_and_grow(halves):
    """If a half had no overflow or no growth, comparing the halves would prove little."""
    for rank in halves[0]:
        scales = rank["straight"]["scales"]
        for half in (scales[:10], scales[10:]):
            steps = list(itertools.pairwise(half))
            assert any(after < before for before, after in steps)
            assert any(after > before for before, after in steps)


@pytest.mark.parametrize("name", EXACT)
def test_a_new_process_continues_bit_for_bit(halves, name):
    for straight, resumed in zip(*halves, strict=True):
        assert resumed["resumed"][name] == straight["straight"][name]
        assert resumed["resumed"]["losses"] == straight["straight"]["losses"][20:]
        assert resumed["resumed"]["scales"] == straight["straight"]["scales"][10:]


@pytest.mark.parametrize("name", EXACT)
def test_the_same_process_continues_bit_for_bit(halves, name):
    for rank in halves[0]:
        assert rank["same process"][name] == rank["straight"][name]


def test_all_ranks_have_one_scale_throughout(halves):
    first, second = halves
    assert first[0]["straight"]["scales"] == first[1]["straight"]["scales"]
    assert second[0]["resumed"]["scales"] == second[1]["resumed"]["scales"]


def test_torchs_distributed_checkpoint_moves_neither_scaler_nor_moments(halves):
    """torch calls ``optimizer.step()`` on zeros to make states, both on saving and on loading."""
    first, second = halves
    for rank in first:
        assert rank["saving moved nothing"]
    for rank in second:
        loaded = rank["loaded"]
        assert loaded["counter"] == {"limit": 25, "steps": 0, "skipped": 0, "in_row": 0}
        assert loaded["scale"] == 2.0**22
        assert all(any(any(state) for state in states) for states in loaded["states"])


def test_ranks_skip_by_the_process_group(run_ranks):
    """Only rank 3 of a 2 x 2 mesh overflows; with the world as group all four ranks skip."""
    found = run_ranks("groups", world=4)
    assert [rank["world"] for rank in found] == [{"scale": 8.0, "skipped": 1}] * 4
    assert [rank["sharded"] for rank in found] == [{"scale": 8.0, "skipped": 1}] * 4
    assert all(rank["parameter"] for rank in found)
    # In a smaller group only its ranks would notice the overflow, so the default is the world.
    assert [rank["tp"]["skipped"] for rank in found] == [0, 0, 1, 1]


def test_offloaded_gradients_need_no_backend_of_their_own(run_ranks):
    """NeMo-RL's first worker has only NCCL, even if its parameters are on the CPU."""
    steps = [[1, 8.0, [[1.0], [1.0]]], [1, 8.0, [[0.5], [0.5]]]]
    assert run_ranks("offloaded") == [steps, steps]


def test_a_fault_on_one_rank_reaches_all(run_ranks):
    one, other = run_ranks("faults")
    for rank in (one, other):
        assert rank["save"][0].endswith("precision_shim_scaler.json")
        assert (rank["load"], rank["scale"]) == ([[], None], 2.0**10)
        assert (rank["node-local"], rank["node-local scale"]) == ([[], None], 2.0**10)
        assert rank["missing"] == [None, None]
        assert "cannot write the loss scaler's state" in rank["cannot save"][1]
        assert "not whole JSON" in rank["truncated"][1]
        assert rank["untouched"]
    assert one["truncated"] == other["truncated"]


def test_ranks_that_read_a_record_each_agree_or_all_of_them_stop(run_ranks):
    found = run_ranks("agreement")
    first, second = (rank["digest"][:8] for rank in found)
    for rank in found:
        assert (rank["same"], rank["none"]) == (None, None)
        assert rank["other"].startswith("here: the ranks' files hold different loss scaler states")
        assert f"(digests by rank: 0: {first}, 1: {second})" in rank["other"]
        assert ", 1: none)" in rank["missing"]
        assert "here: its content does not match its digest" in rank["damaged"]


def test_a_save_in_the_background_names_all_ranks_files(run_ranks):
    """The state is that of the call, and not of the training that continues meanwhile."""
    for found in run_ranks("in_background"):
        assert found["files"] == ["dcp/.metadata", "dcp/__0_0.distcp", "dcp/__1_0.distcp"]
        assert found["said"] == []


def test_the_first_rank_of_a_group_writes_for_it(run_ranks, tmp_path):
    (tmp_path / "taken").write_text("in the way")
    first, *others = run_ranks("in_a_group", world=3, folder=tmp_path)
    assert first is None
    for rank in others:
        assert "cannot write the loss scaler's state" in rank["told"]
    scaler = LossScaler(ScalerSettings(), device="cpu")
    assert load(tmp_path, scaler) == ()
    assert scaler.get_scale() == 2.0
    assert not (tmp_path / "not there").exists()


def test_a_nan_on_one_rank_skips_on_both_and_an_epoch_of_them_ends(run_ranks):
    for rank in run_ranks("nan_on_one_rank"):
        assert rank["unchanged"]
        assert rank["norm is nan"]
        assert rank["ended at"] == 26  # the 25th skip in a row; the first was at step 2
        assert "LossScaleError" in rank["told"]
        assert "25 optimizer steps in a row" in rank["told"]
        assert rank["scale"] >= 1.0


def test_a_step_waits_for_no_more_than_a_scaler_written_in_by_hand(run_ranks):
    for rank in run_ranks("overhead"):
        for by_hand, ours in rank["counts"].values():
            assert by_hand["reads"] > 0
            assert by_hand["collectives"] > 0
            assert ours["reads"] <= by_hand["reads"]
            assert ours["collectives"] <= by_hand["collectives"]
        assert rank["equal"]


def test_another_world_size_gets_the_exact_state(halves, checkpoint):
    """Two ranks wrote the record and one process reads it, because it contains no rank's data."""
    scaler = LossScaler(ScalerSettings(), device="cpu")
    assert load(checkpoint, scaler) == ()
    written = json.loads((checkpoint / FILE_NAME).read_text(encoding="utf-8"))
    assert written["world_size"] == 2
    for rank in halves[0]:
        assert scaler.get_scale() == rank["straight"]["scales"][9]


def test_a_rank_that_owns_no_trainable_element_skips_and_scales_as_the_others(run_ranks):
    """Without its part in the sum of the overflows the other ranks would wait for it forever."""
    nothing, everything = run_ranks("owns_nothing", timeout=120.0)
    assert [owned for owned, *_ in nothing] == [0, 0, 0]
    assert [owned for owned, *_ in everything] == [8, 8, 8]
    for one in (nothing, everything):
        assert [tuple(rest) for _, *rest in one] == [
            ({"loss_scale": 16.0, "skipped_steps": 0.0}, 32.0, True),
            ({"loss_scale": 32.0, "skipped_steps": 1.0}, 16.0, False),
            ({"loss_scale": 16.0, "skipped_steps": 1.0}, 32.0, True),
        ]


WITH, WITHOUT = {"on": True}, {"on": False}


@pytest.mark.parametrize(
    ("given", "options", "told"),
    [
        pytest.param([WITH, WITH], {}, "", id="every process"),
        pytest.param([WITH, WITH], {"late": 1}, "", id="install() after the group was made"),
        pytest.param([WITH, WITHOUT], {}, "of 2 ranks, rank 1: without the shim", id="half"),
        pytest.param([WITH, WITH], {"tcp": True}, "", id="every process, TCP"),
        pytest.param(
            [WITH, WITHOUT], {"tcp": True}, "rank 1: without the shim", id="half, over TCP"
        ),
        pytest.param(
            [WITH, {"on": True, "version": "0.9"}], {}, "rank 1: version=0.9 (here 1.0)", id="old"
        ),
        pytest.param(
            [WITH, {"on": True, "settings": {"growth_interval": 7}}],
            {},
            "rank 1: growth_interval=7 (here 400)",
            id="another setting",
        ),
        pytest.param(
            [WITH, {"on": True, "settings": {"log": "quiet"}}], {}, "", id="a setting of one rank"
        ),
        pytest.param(
            [WITH, WITH, WITHOUT], {"group": [0, 1]}, "", id="a subgroup whose ranks all have it"
        ),
    ],
)
def test_ranks_without_the_shim_are_named(run_ranks, given, options, told):
    """Twice: the second process group has a store of its own."""
    first = run_ranks("marked", world=len(given), given=given, **options)[0]
    assert len(first) == 2
    for one in first:
        assert (told in one) if told else (one == "")
