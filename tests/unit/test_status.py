"""The record of what the shim did: a screen and a table for people, a dict for machines."""

from __future__ import annotations

import json
import pkgutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precision_shim.cli._against import _because
from precision_shim.process.registry import entries, load
from precision_shim.process.settings import FEATURES
from precision_shim.reporting import text as _status_text
from precision_shim.reporting.record import STATES, Decision, FrameworkStatus, SeamStatus
from precision_shim.reporting.text import Status
from precision_shim.upstream.foresight import inapplicable

MORE = "status().details()"

words = st.lists(st.text("abcdefgh.:_-", min_size=1, max_size=30), min_size=1, max_size=40).map(
    " ".join
)
nothing = st.just("")
paths = st.sampled_from(("", "Megatron engine", "FSDP engine", "all engines (metrics)"))
seams = st.builds(
    SeamStatus,
    words,
    st.sampled_from(FEATURES),
    st.sampled_from(STATES),
    nothing | words,
    path=paths,
    refusal=nothing | words,
    why=words,
    upstream=nothing | words,
    delete_when=nothing | words,
)
frameworks = st.builds(
    FrameworkStatus,
    st.none() | st.just("1.0"),
    st.sampled_from(STATES),
    st.lists(seams, max_size=8).map(tuple),
    nothing | words.map(lambda text: text[:100].strip()),
    st.none() | st.booleans(),
)
subjects = st.sampled_from(("actor", "critic", "value"))
statuses = st.builds(
    Status,
    enabled=st.booleans(),
    features=st.lists(st.sampled_from(FEATURES), max_size=4, unique=True).map(tuple),
    settings=st.dictionaries(
        st.text("ab", min_size=1, max_size=8),
        st.one_of(st.text("ab", max_size=8), st.integers(), st.booleans()),
        max_size=3,
    ),
    frameworks=st.dictionaries(st.sampled_from(("verl", "toy")), frameworks, max_size=1),
    decisions=st.lists(
        st.builds(Decision, st.just("verl"), subjects, st.sampled_from(FEATURES), words, words),
        max_size=30,
    ).map(tuple),
    notes=st.lists(words, max_size=4).map(tuple),
)


@given(statuses)
def test_a_line_is_longer_than_80_columns_only_by_a_word_that_cannot_be_broken(status):
    for line in [*str(status).splitlines(), *status.details().splitlines()]:
        assert len(line) <= 80 or len(line.split()) == 1, line


@given(statuses)
def test_one_framework_fits_a_screen_and_what_is_left_out_is_announced(status):
    lines = str(status).splitlines()
    assert len(lines) <= 40
    shown = " ".join(" ".join(lines).split())
    missing = [one for one in status.decisions if one.because not in shown]
    if missing or any(note not in shown for note in status.notes):
        assert MORE in shown


@given(statuses)
def test_the_details_lose_no_word(status):
    shown = " ".join(status.details().split())
    texts = [text for one in status.decisions for text in (one.chosen, one.because)]
    texts += [*status.notes, *(one.reason for one in status.frameworks.values())]
    for one in status.frameworks.values():
        for seam in one.seams:
            texts += [seam.target, seam.reason, seam.why, seam.upstream, seam.delete_when]
            texts += [seam.path, seam.state, seam.feature]
    for text in texts:
        assert text in shown


@given(statuses)
def test_the_dict_is_ready_for_json_and_complete(status):
    found = json.loads(json.dumps(status.to_dict()))
    assert found == status.to_dict()
    assert set(found) == {
        "enabled", "features", "settings", "frameworks", "decisions", "notes", "audit"
    }  # fmt: skip
    assert found["enabled"] is status.enabled
    for name, one in status.frameworks.items():
        assert set(found["frameworks"][name]) == {"version", "state", "reason", "seams"}
        assert found["frameworks"][name]["seams"] == [
            {
                "target": seam.target,
                "feature": seam.feature,
                "state": seam.state,
                "reason": seam.reason,
            }
            for seam in one.seams
        ]
    assert [one["because"] for one in found["decisions"]] == [
        one.because for one in status.decisions
    ]


@pytest.mark.parametrize(("enabled", "word"), [(True, "on"), (False, "off")])
def test_the_first_line_says_on_or_off(enabled, word):
    assert str(Status(enabled=enabled)).splitlines()[0] == f"precision_shim: {word}"


def test_the_first_line_says_strict():
    assert str(Status(enabled=True, settings={"strict": True})) == "precision_shim: on, strict"


def test_only_settings_that_the_user_set_are_on_the_screen():
    status = Status(enabled=True, settings={"log": "quiet", "other": 1}, given=("log",))
    assert "set: log=quiet" in str(status).splitlines()
    assert "other" not in str(status)
    assert "other=1" in status.details()


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
        (
            [seam("wrapped"), seam("native", "all (metrics)")],
            "in force: Megatron engine",
        ),
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


def test_what_a_report_on_a_release_says_of_a_lost_path():
    lost = seam("refused", reason="refused whole, because: get_model not found")
    native = seam("native", reason="verl does a part itself")
    assert _because((native, lost), "bf16-dispatch", lost.path) == lost.reason
    assert _because((native,), "bf16-dispatch", lost.path) == native.reason
    assert inapplicable("verl 1.0", lost) == (
        "verl 1.0: bf16-dispatch (Megatron engine) cannot be applied: refused whole, because: "
        "get_model not found"
    )


def test_features_that_are_off_share_a_line():
    off = (seam("off", feature=one) for one in ("fp16-scaling", "dtype-coercion"))
    one = FrameworkStatus("1.0", "wrapped", (seam("wrapped"), *off))
    text = str(Status(enabled=True, features=("bf16-dispatch",), frameworks={"verl": one}))
    assert "  not asked for: dtype-coercion, fp16-scaling" in text.splitlines()


def test_one_reason_is_said_once():
    because = "mod:symbol not found: no 'symbol' there"
    found = [
        SeamStatus(f"mod:s{i}", feature, "refused", reason, path=path)
        for feature in ("bf16-dispatch", "fp16-scaling")
        for path in ("Megatron engine", "FSDP engine")
        for i, reason in enumerate([because, *[f"refused whole, because: {because}"] * 5])
    ]
    one = FrameworkStatus("1.0", "refused", tuple(found), "not among the tested versions: 2.0")
    text = " ".join(str(Status(enabled=True, features=FEATURES, frameworks={"verl": one})).split())
    assert text.count(because) == 1
    assert text.count("not among the tested versions") == 1
    assert "PRECISION_SHIM_FEATURES=-bf16-dispatch,-fp16-scaling" in text


def test_of_many_decisions_the_newest_per_subject_and_feature_stay():
    decisions = [
        Decision("verl", subject, feature, f"choice {i}", "because of many words " * 4)
        for i in range(10)
        for subject in ("actor", "critic")
        for feature in FEATURES[:2]
    ]
    text = str(Status(enabled=True, features=FEATURES, decisions=tuple(decisions)))
    assert text.count("choice 9") == 4
    assert "choice 8" not in text
    assert text.splitlines()[-1] == f"  36 more: {MORE}"


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
