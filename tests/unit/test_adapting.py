"""Settings that a framework's own config carries."""

from __future__ import annotations

import pytest

from precision_shim.adapting import parse_settings
from precision_shim.errors import SettingsError

NAMES = ("growth_interval", "growth_factor")


def test_values_are_parsed_and_none_is_left_out():
    given = {"growth_interval": "7", "growth_factor": None}
    assert parse_settings(given, NAMES, "policy.block") == {"growth_interval": 7}
    assert parse_settings({}, NAMES, "policy.block") == {}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"growth_interval": 0}, r"policy\.block\.growth_interval: .*0 .*a whole number >= 1"),
        ({"growth_factor": 1.0}, r"policy\.block\.growth_factor: .*> 1"),
        ("abc", r"policy\.block='abc': expected a section with keys; allowed: growth_interval, g"),
        ({"log": "debug"}, r"policy\.block: unknown key 'log'; allowed: growth_interval, growth_f"),
    ],
)
def test_what_makes_no_sense_names_the_place_in_the_config(given, says):
    with pytest.raises(SettingsError, match=says):
        parse_settings(given, NAMES, "policy.block")
