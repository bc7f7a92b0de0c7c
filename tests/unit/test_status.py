"""The record of what the shim did: a screen and a table for people, a dict for machines."""

from __future__ import annotations

import pkgutil

import pytest

from precision_shim.precision.findings import Decision
from precision_shim.process.registry import entries, load
from precision_shim.process.settings import FEATURES
from precision_shim.reporting import journal
from precision_shim.reporting import text as _status_text
from precision_shim.reporting.record import FrameworkStatus, SeamStatus
from precision_shim.reporting.status import Status

MORE = "status().details()"

# -- a framework on the screen ----------------------------------------------------------------


def seam(state, path="Megatron engine", feature="bf16-dispatch", reason="", **more):
    return SeamStatus(f"mod:{path[:4]}{state}", feature, state, reason, path=path, **more)


def line(*found, **more):
    """The text of the line on bf16-dispatch, without its line breaks."""
    one = FrameworkStatus("1.0", more.pop("state", "wrapped"), found, tested=True, **more)
    text = str(Status(enabled=True, features=FEATURES, frameworks={"verl": one}))
    joined = " ".join(text.split())
    return joined[joined.index("bf16-dispatch ") + 14 :].partition(" what is wrong")[0]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([seam("wrapped"), seam("pending")], "in force: Megatron engine"),
        ([seam("wrapped"), seam("absent")], "in force: Megatron engine"),
        ([seam("pending"), seam("absent")], "waits for import: Megatron engine"),
        ([seam("native"), seam("absent")], "verl does it itself: Megatron engine"),
        ([seam("native"), seam("wrapped")], "in force beside verl's own: Megatron engine"),
        ([seam("native"), seam("pending")], "waits for import: Megatron engine"),
        ([seam("absent")], "nothing of what it patches is here"),
        ([seam("wrapped", path="")], "in force"),
        (
            [seam("wrapped"), seam("refused", "FSDP engine", reason="r"), seam("pending", "Z")],
            "in force: Megatron engine; waits for import: Z; refused: FSDP engine",
        ),
        (
            [seam("wrapped"), seam("pending", "veomni engine", reason="r", refusal="r")],
            "in force: Megatron engine; not on: veomni engine",
        ),
        (
            [seam("wrapped"), seam("refused", "veomni engine", reason="r", refusal="r")],
            "in force: Megatron engine; not on: veomni engine",
        ),
        # A path that only serves other paths is named only if its state differs from theirs.
        ([seam("wrapped"), seam("pending", "all (metrics)")], "in force: Megatron engine"),
        (
            [seam("wrapped"), seam("refused", "all (metrics)", reason="r")],
            "in force: Megatron engine; refused: all (metrics)",
        ),
        ([seam("wrapped"), seam("native", "all (metrics)")], "in force: Megatron engine"),
        (
            [seam("wrapped"), *[seam("absent", "Legacy")] * 2, seam("native", "Legacy")],
            "in force: Megatron engine",
        ),
        ([seam("absent"), seam("wrapped", "all (metrics)")], "in force: all (metrics)"),
    ],
)
def test_a_feature_is_one_line_of_paths(found, expected):
    assert line(*found) == expected


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([seam("pending")], "would be in force: Megatron engine"),
        ([seam("native")], "verl does it itself: Megatron engine"),
        (
            [seam("native"), seam("pending")],
            "would be in force beside verl's own: Megatron engine",
        ),
        ([seam("native"), seam("refused", reason="r")], "refused: Megatron engine"),
    ],
)  # fmt: skip
def test_the_doctor_tells_a_part_that_the_framework_has(found, expected):
    one = FrameworkStatus("1.0", "pending", tuple(found), tested=True)
    lines = _status_text.framework("verl", one, FEATURES, ahead=True)
    assert " ".join(" ".join(lines[1:]).split()) == f"bf16-dispatch {expected}"


def test_paths_that_wait_share_a_word_whoever_does_a_part():
    both = line(seam("pending"), seam("native", "FSDP engine"), seam("pending", "FSDP engine"))
    assert both == "waits for import: Megatron engine, FSDP engine"


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (FrameworkStatus("1.0", "pending"), "verl 1.0: waits for its import"),
        (
            FrameworkStatus("1.0", "pending", (seam("pending"),), tested=True),
            "verl 1.0, tested: imported; waits for modules that it has not imported yet",
        ),
        (FrameworkStatus("1.0", "wrapped", (seam("wrapped"),), "r", False), "1.0, not tested: "),
        (
            FrameworkStatus("1.0", "wrapped", (seam("wrapped"), seam("refused"))),
            "verl 1.0: in force, but refused in part",
        ),
        (FrameworkStatus("1.0", "refused", (seam("refused"),)), "verl 1.0: refused"),
        (FrameworkStatus("1.0", "refused", reason="broken"), "verl: broken"),
        (FrameworkStatus("1.0", "native", (seam("native"),)), "verl 1.0: does all of it itself"),
        (FrameworkStatus("1.0", "off", reason="not named"), "not asked for: verl"),
        (FrameworkStatus(None, "absent"), "not installed: verl"),
    ],
)  # fmt: skip
def test_the_verdict_on_a_framework(one, expected):
    assert expected in str(Status(enabled=True, features=FEATURES, frameworks={"verl": one}))


def test_a_path_that_is_lost_alone_costs_no_feature():
    found = (seam("wrapped"), seam("refused", "all (metrics)", reason="r"))
    told = _status_text.refusals("verl 1.0", found)
    assert told[:2] == [
        "verl 1.0: refused: bf16-dispatch (all (metrics)), because: r",
        "verl 1.0: bf16-dispatch: the other paths go on without it; under strict it is an error",
    ]
    assert not any("go on" in one for one in _status_text.refusals("verl 1.0", found[1:]))


def test_one_reason_is_said_once():
    because = "mod:symbol not found: no 'symbol' there"
    found = [
        SeamStatus(f"mod:s{i}", feature, "refused", reason, (because,), path)
        for feature in ("bf16-dispatch", "fp16-scaling")
        for path in ("Megatron engine", "FSDP engine")
        for i, reason in enumerate([because, *[f"refused whole, because: {because}"] * 5])
    ]
    one = FrameworkStatus("1.0", "refused", tuple(found), "not among the tested versions: 2.0")
    text = " ".join(str(Status(enabled=True, features=FEATURES, frameworks={"verl": one})).split())
    assert text.count(because) == 1
    assert text.count("not among the tested versions") == 1
    assert "PRECISION_SHIM_FEATURES=-bf16-dispatch,-fp16-scaling" in text


def test_of_many_decisions_the_newest_stay():
    decisions = [
        Decision("verl", subject, feature, f"choice {i}", "because of many words " * 4)
        for i in range(10)
        for subject in ("actor", "critic")
        for feature in FEATURES[:2]
    ]
    text = str(Status(enabled=True, features=FEATURES, decisions=tuple(decisions)))
    lines = text.splitlines()
    assert len(lines) <= _status_text.SCREEN
    assert text.count("choice 9") == 4
    assert "choice 0" not in text
    assert lines[-1] == f"  {40 - text.count('choice')} more: {MORE}"


def test_recording_and_showing_a_decision_does_not_look_at_all_others(monkeypatch):
    class Counted(Decision):
        compared = 0
        __hash__ = Decision.__hash__

        def __eq__(self, other):
            Counted.compared += 1
            return super().__eq__(other)

    def folds(number):
        journal.clear()
        for i in [*range(number), *range(number)]:
            journal.record(Counted("verl", "actor", "audit", f"choice {i}", "because"))
        decided, before = journal.decisions(), len(folded)
        assert len(decided) == number
        assert f"choice {number - 1} " in str(Status(enabled=True, decisions=decided))
        return len(folded) - before

    fold, folded = _status_text.fold, []
    monkeypatch.setattr(_status_text, "fold", lambda *given: folded.append(1) or fold(*given))
    monkeypatch.setattr(journal, "verbosity", "quiet")
    assert folds(100) == folds(1000) < 100
    assert Counted.compared <= 1100  # each repeated decision is compared with itself alone
    journal.clear()


def test_one_text_that_is_longer_than_the_screen_is_cut():
    decision = Decision("verl", "actor", "fp16-scaling", "one choice", "of many words " * 500)
    notes = ("a long note " * 500,)
    text = str(Status(enabled=True, features=FEATURES, decisions=(decision,), notes=notes))
    lines = text.splitlines()
    assert len(lines) == _status_text.SCREEN
    assert [one.strip() for one in lines].count(f"the rest: {MORE}") == 2
    assert "one choice" in text


# -- our adapters -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", entries(third_party=False))
def test_every_group_of_our_adapters_has_a_users_name_and_no_other_has_one(name):
    adapter = load(entries()[name])
    used = {seam.group for seam in adapter.seams}
    assert used == set(adapter.paths), "declare it in the adapter's paths"


@pytest.mark.parametrize("name", entries(third_party=False))
def test_every_place_that_an_adapter_of_ours_names_exists(name):
    adapter = entries()[name]
    named = [adapter.audit_readers, adapter.checkpoint_readers]
    named += [adapter.checkpoints.resuming] if adapter.checkpoints is not None else []
    for place in (place for places in named for place in places.values()):
        assert callable(pkgutil.resolve_name(place)), place
