"""verl's FSDP checkpoints in fp16: saves that are killed, and directories that are saved again.

verl writes its files one after the other. With the shim a resume is exact from one save, or verl
refuses it, or the shim warns that the loss scaler restarts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from ..processes.rank_server import Ranks
from .conftest import VERL

pytestmark = [
    pytest.mark.skipif(Version("0.7") > VERL, reason="0.6's are covered by test_untested_version"),
    pytest.mark.slow,
]


def assert_honest(found: list[dict[str, Any]]) -> set[str]:
    """Each resume is exact, or verl refuses, or the shim warns, as the doctor predicted.

    Returns the ends that were seen.
    """
    seen = set()
    for one in found:
        for outcome in one["outcomes"]:
            kind, said = outcome["outcome"], outcome["said"]
            seen.add("told" if said else kind)
            if said:
                (line,) = said
                assert "a fresh scaler" in line
                assert outcome["predicted"] == "starts anew", outcome
            elif kind == "refused by verl":
                assert outcome["predicted"] in ("unreadable", "fails", "starts anew"), outcome
            else:
                assert kind in ("old", "new"), outcome
                assert outcome["predicted"] == "exact", outcome
    return seen


def assert_killed(found: list[dict[str, Any]], over: bool) -> None:
    """The ends of a save that was killed at each file operation."""
    assert assert_honest(found) == {"told", "new", "old" if over else "refused by verl"}
    assert {one["outcomes"][-1]["outcome"] for one in found} == {"new"}


def test_killed_at_any_file_operation_of_a_save(fsdp_ranks: Ranks, tmp_path: Path) -> None:
    """Into a fresh directory."""
    found = fsdp_ranks("ended_early", world=1, folder=tmp_path / "copies", over=False)
    assert_killed(found, over=False)
    # A process that is really killed leaves the same files as the copies.
    contents = list(found[0]["contents"].values())
    for content in contents[len(contents) // 3 :: len(contents) // 2]:
        place = tmp_path / content
        fsdp_ranks("ended", world=1, folder=place, dies=True, content=content)


def test_killed_at_any_file_operation_of_either_of_two_ranks(fsdp_ranks: Ranks) -> None:
    """Over an old save."""
    assert_killed(fsdp_ranks("ended_early", over=True), over=True)


def test_another_job_saves_into_the_directory_meanwhile(fsdp_ranks: Ranks) -> None:
    seen = assert_honest(fsdp_ranks("beside", world=1))
    assert {"told", "new"} <= seen <= {"told", "new", "old"}


@pytest.mark.oldest
def test_saved_again_in_bfloat16_the_record_is_not_taken(fsdp_ranks: Ranks) -> None:
    for one in fsdp_ranks("saved_again", copied=False):
        (said,) = one["said"]
        assert "is of another save than the files beside it: extra_state_world_size_2" in said
        assert "fresh scaler at 2" in said
        assert (one["loaded"]["scale"], one["loaded"]["tracker"]) == (2.0, 0)
        assert one["loaded"]["counter"] == [0, 0, 0]
        assert one["first"]["counter"] == [4, 1, 0]
        assert one["predicted"] == "starts anew"
        assert one["strict"].startswith("ScalerOfAnotherSaveError: verl")
        assert one["foretold_strict"] == "refused"


@pytest.mark.oldest
def test_copied_and_moved_the_record_is_taken(fsdp_ranks: Ranks) -> None:
    for one in fsdp_ranks("saved_again", copied=True):
        assert one["loaded"] == one["first"]
        assert one["said"] == []
        assert one["strict"] == ""
        assert (one["predicted"], one["foretold_strict"]) == ("exact", "exact")


@pytest.mark.oldest
@pytest.mark.skipif(
    not Version("0.7") <= VERL < Version("0.8"), reason="verl 0.8 has no legacy workers"
)
def test_a_legacy_worker_saved_again_without_the_shim(fsdp_ranks: Ranks) -> None:
    for one in fsdp_ranks("legacy_saved_again"):
        (said,) = one["said"]
        assert "is of another save" in said
        assert one["loaded"]["scale"] == 2.0
        assert one["loaded"]["counter"] == [0, 0, 0]
