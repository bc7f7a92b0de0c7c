"""Draws are the same on every machine, and ends are judged correctly, on hand-made results."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .drawing import SHARDINGS, draw, parse
from .ends import end_of
from .test_pairs import KNOWN

STATE = {
    "parameters": "p",
    "exp_avg": "a",
    "exp_avg_sq": "q",
    "scale": 512.0,
    "tracker": 2,
    "counts": [3, 1, 0],
}
SETTINGS = {"computed": "fp16", "settings": [400, 2.0, 0.5]}
FRESH = "verl 0.9.1: no loss scaler state at PATH. Training continues with a fresh scaler at 65536."
PAIR = "- | dtype=fp16 | dtype=fp16 seed=1"


def test_a_text_is_its_pair() -> None:
    for number in range(500):
        pair = draw(1, number)
        assert parse(str(pair)) == pair
    for text in KNOWN.values():
        assert parse(str(parse(text))) == parse(text)


def test_the_same_pairs_everywhere() -> None:
    """``random()`` gives the same numbers in every version of Python."""
    assert str(draw(22, 3)) == (
        "stop=1 overflows=2 | dtype=fp16 init=2 interval=2 "
        "| shim=bf16-dispatch+fp16-scaling dtype=fp32 init=1024 interval=3 seed=1"
    )


def test_a_hundred_pairs_hold_every_kind() -> None:
    pairs = [draw(22, number) for number in range(112)]
    jobs = [job for pair in pairs for job in pair.jobs]
    assert {pair.backend for pair in pairs} == {"fsdp", "megatron"}
    assert {pair.ranks for pair in pairs} == {1, 2}
    assert {pair.sharding for pair in pairs} == {"", *SHARDINGS}
    assert {pair.engine for pair in pairs} == {"2.11.0", "none"}
    assert {len(pair.jobs) for pair in pairs} == {2, 3}
    assert {bool(pair.kill) for pair in pairs} == {True, False}
    assert {job.dtype for job in jobs} >= {"bf16", "fp16", "fp32", "mixed", "bf16-stored"}
    assert {job.copied for job in jobs} == {"", "replace", "pickle", "deepcopy"}
    order = {(pair.jobs[-2].shim, pair.jobs[-1].shim) for pair in pairs}
    assert order >= {("on", "on"), ("on", "off"), ("off", "on"), ("off", "off")}


# -- how a pair ended --------------------------------------------------------------------------


def saver(**changes: Any) -> dict[str, Any]:
    """The results of a saving job's rank."""
    return {
        "error": None,
        "phase": "",
        "state": STATE,
        "unmoved": True,
        "next": [["l1", "n1", 512.0], ["l2", "n2", 512.0]],
        "end": {**STATE, "parameters": "later"},
        "effective": SETTINGS,
        "said": [],
        "decisions": [],
        **changes,
    }


def ended(tmp_path: Path, text: str, *patched: dict[str, Any], plain: Any = ()) -> str:
    """The end of a pair with the given results; ``plain`` are the results with the shim off."""
    results = {str(parse(text)): patched, str(parse(text).unpatched()): plain or patched}

    def launch(backend: str) -> Callable[..., Any]:
        def ranks(case: str, *, folder: Path, pair: str, number: int, **options: Any) -> Any:
            found = copy.deepcopy(results[pair][number])
            folder.mkdir(parents=True, exist_ok=True)
            if "killed" in found or number < len(results[pair]) - 1:
                state = found.pop("before", found.get("state"))
                (folder / f"saved-{number}-0.json").write_text(json.dumps(state))
            return [found]

        return ranks

    return end_of(parse(text), launch, tmp_path).kind


ANEW = {**STATE, "scale": 65536.0, "tracker": 0, "counts": [0, 0, 0]}


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({}, "exact"),
        ({"state": {**STATE, "parameters": "other"}}, "wrong"),
        ({"state": {**STATE, "exp_avg_sq": "other"}}, "wrong"),
        ({"state": {**STATE, "counts": [3, 2, 0]}}, "wrong"),
        ({"state": ANEW}, "wrong"),
        ({"state": ANEW, "said": [FRESH]}, "told"),
        ({"state": {**ANEW, "exp_avg": "other"}, "said": [FRESH]}, "wrong"),
        ({"next": [["l1", "n1", 512.0], ["l2", "other", 512.0]]}, "wrong"),
        ({"next": [["l1", "n1", 1.0], ["l2", "n2", 1.0]]}, "wrong"),
        ({"end": {**STATE, "parameters": "elsewhere"}}, "wrong"),
        (
            {"error": ["CheckpointLayoutError", "Set this to that", True], "phase": "load"},
            "refused",
        ),
        ({"error": ["CheckpointLayoutError", "no.", True], "phase": "load"}, "wrong"),
        ({"predicted": "exact"}, "exact"),
        ({"predicted": "exact", "state": ANEW, "said": [FRESH]}, "wrong"),
        (
            {
                "predicted": "exact",
                "error": ["CheckpointLayoutError", "Set this to that", True],
                "phase": "load",
            },
            "wrong",
        ),
        ({"error": ["AssertionError", "", False], "phase": "load"}, "wrong"),
    ],
)
def test_with_the_shim_on(tmp_path: Path, changes: dict[str, Any], end: str) -> None:
    assert ended(tmp_path, PAIR, saver(), saver(**changes), plain=(saver(), saver())) == end


def test_what_the_doctor_cannot_foretell(tmp_path: Path) -> None:
    """The doctor does not know that the resuming job has a model of another dtype."""
    told = saver(state=ANEW, said=[FRESH], predicted="exact")
    text = "- | dtype=bf16 | dtype=fp16 seed=1"
    assert ended(tmp_path, text, saver(), told) == "told"


def test_an_error_is_allowed_where_the_framework_alone_has_it_too(tmp_path: Path) -> None:
    failed = saver(error=["KeyError", "'state'", False], phase="load")
    assert ended(tmp_path, PAIR, saver(), failed) == "as unpatched"
    assert ended(tmp_path, PAIR, saver(), failed, plain=(saver(), saver())) == "wrong"


def test_what_the_shim_does_not_keep_when_it_is_off(tmp_path: Path) -> None:
    """With the shim off a restarted scaler is verl's own behaviour; changed moments are not."""
    text = "- | dtype=fp16 | shim=off dtype=fp16 seed=1"
    fresh, other = saver(state=ANEW), saver(state={**STATE, "exp_avg": "other"})
    assert ended(tmp_path, text, saver(), fresh, plain=(saver(), fresh)) == "as unpatched"
    assert ended(tmp_path, text, saver(), other, plain=(saver(), fresh)) == "wrong"


def test_what_the_shim_never_keeps_of_fsdp(tmp_path: Path) -> None:
    """Parameters that torch rounds are allowed to differ, but the shim must keep the scaler."""
    rounded, told = saver(state={**STATE, "parameters": "other"}), {"said": [FRESH]}
    both = {**ANEW, "parameters": "other"}
    plain = (saver(), rounded)
    assert ended(tmp_path, PAIR, saver(), rounded, plain=plain) == "as unpatched"
    assert ended(tmp_path, PAIR, saver(), saver(state=both, **told), plain=plain) == "as unpatched"
    assert ended(tmp_path, PAIR, saver(), saver(state=both), plain=plain) == "wrong"


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({}, "exact"),
        ({"state": {**STATE, "parameters": "new", "exp_avg": "new", "exp_avg_sq": "new"}}, "wrong"),
        ({"state": {**STATE, "parameters": "new"}}, "as unpatched"),
        ({"state": {**STATE, "scale": 4.0, "tracker": 1, "counts": [3, 0, 0]}}, "wrong"),
        ({"state": ANEW, "said": [FRESH]}, "told"),
        ({"error": ["EOFError", "", False], "phase": "load"}, "killed"),
    ],
)
def test_a_save_that_was_killed(tmp_path: Path, changes: dict[str, Any], end: str) -> None:
    """The scaler and the states must come from the same save."""
    new = {"parameters": "new", "exp_avg": "new", "exp_avg_sq": "new"}
    later = {**STATE, **new, "scale": 4.0, "tracker": 1, "counts": [3, 0, 0]}
    text = "kill=4 | dtype=fp16 | dtype=fp16 seed=1 | dtype=fp16 seed=2"
    killed = {"error": None, "killed": True, "before": later}
    assert ended(tmp_path, text, saver(), killed, saver(**changes)) == end
