"""The record of what the shim did: its table for people and its dict for machines."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precision_shim._status import STATES, Decision, FrameworkStatus, SeamStatus, Status

words = st.lists(st.text("abcdefgh.:_-", min_size=1, max_size=30), min_size=1, max_size=40).map(
    " ".join
)
seams = st.builds(SeamStatus, words, words, st.sampled_from(STATES), st.just("") | words)
statuses = st.builds(
    Status,
    enabled=st.booleans(),
    features=st.lists(words, max_size=3).map(tuple),
    settings=st.dictionaries(words, st.one_of(words, st.integers(), st.booleans()), max_size=3),
    frameworks=st.dictionaries(
        st.text("abc", min_size=1),
        st.builds(
            FrameworkStatus,
            st.none() | st.just("1.0"),
            st.sampled_from(STATES),
            st.lists(seams, max_size=3).map(tuple),
            words,
        ),
        max_size=2,
    ),
    decisions=st.lists(st.builds(Decision, words, words, words, words, words)).map(tuple),
    notes=st.lists(words, max_size=2).map(tuple),
)


@given(statuses)
def test_a_line_is_longer_than_80_columns_only_by_a_word_that_cannot_be_broken(status):
    for line in str(status).splitlines():
        assert len(line) <= 80 or len(line.split()) == 1, line


@given(statuses)
def test_the_table_loses_no_word(status):
    shown = " ".join(str(status).split())
    texts = [text for one in status.decisions for text in (one.chosen, one.because)]
    texts += [*status.notes, *(one.reason for one in status.frameworks.values())]
    texts += [seam.target for one in status.frameworks.values() for seam in one.seams]
    for text in texts:
        assert text in shown


@given(statuses)
def test_the_dict_is_ready_for_json_and_complete(status):
    found = json.loads(json.dumps(status.to_dict()))
    assert found == status.to_dict()
    assert found["enabled"] is status.enabled
    for name, one in status.frameworks.items():
        assert [seam["target"] for seam in found["frameworks"][name]["seams"]] == [
            seam.target for seam in one.seams
        ]
    assert [one["because"] for one in found["decisions"]] == [
        one.because for one in status.decisions
    ]


@pytest.mark.parametrize(("enabled", "word"), [(True, "on"), (False, "off")])
def test_the_first_line_says_on_or_off(enabled, word):
    assert str(Status(enabled=enabled)).splitlines()[0] == f"precision_shim: {word}"
