"""Settings: valid values, precedence, and the message about an invalid value."""

from __future__ import annotations

import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precision_shim.errors import SettingsError
from precision_shim.process.settings import FEATURES, TABLE, parse_features, resolve, switch

CHOICES = {
    "optimizer_states": ("auto", "follow-model", "as-configured"),
    "grad_bucket": ("unless-set", "align"),
    "rollout": ("tell", "follow"),
    "head": ("as-configured", "fp32"),
    "log": ("quiet", "info", "debug"),
}
DEFAULTS = {
    "optimizer_states": "auto",
    "grad_bucket": "unless-set",
    "rollout": "tell",
    "head": "as-configured",
    "loss_scale_init": 65536.0,
    "growth_interval": 400,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "audit_dir": "",
    "watch_updates": 0,
    "log": "info",
}


@st.composite
def spelled(draw, text):
    """Draw a text in any case, with whitespace around it."""
    cases = draw(st.lists(st.booleans(), min_size=len(text), max_size=len(text)))
    padding = st.text(" \t\n", max_size=2)
    letters = [one.upper() if up else one for one, up in zip(text, cases, strict=True)]
    return draw(padding) + "".join(letters) + draw(padding)


def good(name):
    """A strategy for valid values of a setting, each with the result of reading it."""
    if name in CHOICES:
        return st.sampled_from(CHOICES[name]).flatmap(
            lambda value: st.tuples(spelled(value), st.just(value))
        )
    if name == "audit_dir":
        folders = st.text("abc ._-é", max_size=8).map(lambda text: f"/x{text}y")
        return folders.map(lambda text: (f" {text}\n", text))
    if name == "growth_interval":
        return st.integers(1, 10**9).map(lambda value: (value, value))
    if name == "watch_updates":
        return st.integers(0, 10**9).map(lambda value: (str(value), value))
    low, high = {"loss_scale_init": (0, 1e30), "growth_factor": (1, 1e30)}.get(name, (0, 1))
    numbers = st.floats(low, high, exclude_min=True, exclude_max=True)
    return numbers.map(lambda value: (value, value))


BAD = [
    ("optimizer_states", "follow", "auto | follow-model | as-configured"),
    ("grad_bucket", "always", "unless-set | align"),
    ("rollout", "auto", "tell | follow"),
    ("head", "bf16", "as-configured | fp32"),
    ("audit_dir", 1, "a path"),
    ("audit_dir", "a\0b", "a path without a null character"),
    ("log", "warning", "quiet | info | debug"),
    ("loss_scale_init", 0, "> 0"),
    ("loss_scale_init", "-1", "> 0"),
    ("loss_scale_init", "1e39", "< 3.4e+38"),
    ("loss_scale_init", "inf", "finite"),
    ("loss_scale_init", "nan", "finite"),
    ("loss_scale_init", 10**400, "finite"),
    ("growth_interval", 0, "whole number >= 1"),
    ("growth_interval", 1.5, "whole number >= 1"),
    ("growth_interval", True, "whole number >= 1"),
    ("audit_dir", "/dev/null", "a directory"),
    ("watch_updates", -1, "whole number >= 0"),
    ("growth_factor", 1.0, "> 1"),
    ("backoff_factor", 1.0, "< 1"),
    ("backoff_factor", 0.0, "> 0"),
]


def test_defaults_are_the_contracts():
    settings = resolve(environ={})
    assert dict(settings.values) == DEFAULTS
    assert set(settings.origin.values()) == {"default"}
    assert settings.features == FEATURES
    assert settings.frameworks is None
    assert settings.strict is False
    assert settings.given == {}


@given(st.data(), st.sampled_from(sorted(TABLE)))
def test_a_good_value_means_the_same_as_argument_and_as_variable(data, name):
    value, meaning = data.draw(good(name))
    argument = resolve(settings={name: value}, environ={})
    variable = resolve(environ={TABLE[name].variable: str(value)})
    assert argument[name] == variable[name] == meaning
    assert argument.is_set(name)
    assert variable.is_set(name)
    assert (argument.origin[name], variable.origin[name]) == ("argument", "variable")


@pytest.mark.parametrize(("name", "value", "allowed"), BAD)
def test_a_bad_argument_is_named_with_what_is_allowed(name, value, allowed):
    with pytest.raises(SettingsError) as caught:
        resolve(settings={name: value}, environ={})
    message = str(caught.value)
    assert TABLE[name].variable in message
    assert repr(value) in message
    assert allowed in message


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("strict", "no"),
        ("features", 5),
        ("features", b"audit"),
        ("frameworks", b"verl"),
        ("settings", "growth_interval=3"),
        ("settings", {1: 2}),
        ("settings", {None: 2, "a": 3}),
    ],
)
def test_an_argument_of_another_type_is_an_error_of_ours(argument, value):
    """``strict="no"`` must not mean strict because the text counts as true."""
    with pytest.raises(SettingsError, match=rf"install\({argument}=\.\.\.\).*; allowed: "):
        resolve(**{argument: value}, environ={})


def test_a_path_may_be_an_object_of_bytes(tmp_path):
    (tmp_path / "audits").mkdir()
    (entry,) = os.scandir(os.fsencode(tmp_path))
    assert resolve(settings={"audit_dir": entry}, environ={})["audit_dir"] == f"{tmp_path}/audits"


def test_children_take_all_frameworks_where_an_argument_asks_for_all():
    environ = {"PRECISION_SHIM_FRAMEWORKS": "verl"}
    asked = resolve(frameworks=[], environ=environ)
    assert asked.frameworks is None
    assert resolve(environ={**environ, **asked.given}).frameworks is None
    assert "PRECISION_SHIM_FRAMEWORKS" not in resolve(frameworks=[], environ={}).given


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [one for one in BAD if isinstance(one[1], str) and "\0" not in one[1]],
)
def test_a_bad_variable_is_named_with_what_is_allowed(name, value, allowed):
    with pytest.raises(SettingsError) as caught:
        resolve(environ={TABLE[name].variable: value})
    message = str(caught.value)
    assert f"{TABLE[name].variable}={value!r}" in message
    assert allowed in message


@given(st.one_of(st.text(), st.integers(), st.floats(), st.none(), st.binary()))
def test_any_value_is_a_number_in_bounds_or_an_error(value):
    for name in ("loss_scale_init", "growth_interval", "growth_factor", "backoff_factor"):
        try:
            number = resolve(settings={name: value}, environ={})[name]
        except SettingsError:
            continue
        assert 0 < number < float("inf")
        assert number > 1 or name != "growth_factor"
        assert number < 1 or name != "backoff_factor"
        assert number == int(number) or name != "growth_interval"


def test_a_setting_that_does_not_exist_is_an_error():
    with pytest.raises(SettingsError, match=r"'grad_buckets'.*allowed:.*grad_bucket"):
        resolve(settings={"grad_buckets": "align"}, environ={})


# -- what wins ------------------------------------------------------------------------------------


@given(st.data(), st.sampled_from(sorted(TABLE)))
def test_argument_wins_over_variable_and_variable_over_default(data, name):
    value, meaning = data.draw(good(name))
    other, other_meaning = data.draw(good(name))
    environ = {TABLE[name].variable: str(other)}
    both = resolve(settings={name: value}, environ=environ)
    assert both[name] == meaning
    assert resolve(environ=environ)[name] == other_meaning
    untouched = set(TABLE) - {name}
    assert {one: both[one] for one in untouched} == {one: DEFAULTS[one] for one in untouched}


@pytest.mark.parametrize("blank", ["", " ", "\t"])
def test_a_blank_variable_is_an_unset_one(blank):
    environ = {row.variable: blank for row in TABLE.values()}
    environ |= dict.fromkeys(
        ("PRECISION_SHIM", "PRECISION_SHIM_FEATURES", "PRECISION_SHIM_FRAMEWORKS"), blank
    )
    assert resolve(environ=environ) == resolve(environ={})


@given(st.data())
def test_what_is_given_to_children_means_the_same_there(data):
    names = data.draw(st.lists(st.sampled_from(sorted(TABLE)), unique=True))
    chosen = {name: data.draw(good(name))[0] for name in names}
    features = data.draw(st.none() | st.lists(st.sampled_from(FEATURES)))
    frameworks = data.draw(st.none() | st.lists(st.sampled_from(["verl", "skyrl"])))
    here = resolve(settings=chosen, features=features, frameworks=frameworks, environ={})
    there = resolve(environ=here.given)
    assert there.effective() == here.effective()


def test_only_arguments_are_given_to_children():
    environ = {"PRECISION_SHIM_LOG": "quiet", "PRECISION_SHIM_FEATURES": "dtype-coercion"}
    settings = resolve(settings={"grad_bucket": "align"}, environ=environ)
    assert settings.given == {"PRECISION_SHIM_GRAD_BUCKET": "align"}


# -- PRECISION_SHIM -------------------------------------------------------------------------------


@given(
    st.sampled_from(
        [(text, "on") for text in ("1", "true", "on", "yes")]
        + [(text, "off") for text in ("0", "false", "off", "no")]
        + [("strict", "strict"), ("", "unset")]
    ).flatmap(lambda pair: st.tuples(spelled(pair[0]), st.just(pair[1])))
)
def test_the_switch_in_every_spelling(pair):
    text, meaning = pair
    assert switch({"PRECISION_SHIM": text}) == meaning
    assert resolve(environ={"PRECISION_SHIM": text}).strict == (meaning == "strict")


@pytest.mark.parametrize("text", ["2", "strictly"])
def test_a_bad_switch_is_named_with_what_is_allowed(text):
    with pytest.raises(SettingsError) as caught:
        switch({"PRECISION_SHIM": text})
    for part in ("PRECISION_SHIM", repr(text), "1/true/on", "strict", "0/false/off"):
        assert part in str(caught.value)


@pytest.mark.parametrize("variable", ["1", "strict", ""])
@pytest.mark.parametrize("argument", [True, False])
def test_strict_as_an_argument_wins(variable, argument):
    assert resolve(strict=argument, environ={"PRECISION_SHIM": variable}).strict is argument


# -- features and frameworks ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "meaning"),
    [
        ("", FEATURES),
        ([], ()),
        ("dtype-coercion", ("dtype-coercion",)),
        ("DTYPE-Coercion , fp16-scaling", ("dtype-coercion", "fp16-scaling")),
        (["fp16-scaling", "dtype-coercion"], ("dtype-coercion", "fp16-scaling")),
        (iter(["fp16-scaling"]), ("fp16-scaling",)),
        ("-fp16-scaling", (*FEATURES[:3], *FEATURES[4:])),
        (["-bf16-dispatch"], (FEATURES[0], *FEATURES[2:])),
        ("dtype-coercion,fp16-scaling,-fp16-scaling", ("dtype-coercion",)),
        ("dtype-coercion,-dtype-coercion", ()),
        ("-dtype-coercion,dtype-coercion", FEATURES),
        (",".join(f"-{name}" for name in FEATURES), ()),
    ],
)
def test_feature_lists(value, meaning):
    assert parse_features(value) == meaning


@given(st.lists(st.sampled_from([*FEATURES, *(f"-{name}" for name in FEATURES)])))
def test_features_are_in_the_tables_order_and_named_once(names):
    chosen = parse_features(names)
    assert list(chosen) == [name for name in FEATURES if name in chosen]
    assert parse_features(",".join(names) or "-" + ",-".join(FEATURES)) == chosen
    if names:
        last = names[-1]
        assert (last.lstrip("-") in chosen) == (not last.startswith("-"))


@pytest.mark.parametrize("bad", ["dtype_coercion", "-nothing", "dtype-coercion,all", "--", "1"])
@pytest.mark.parametrize("as_argument", [True, False])
def test_a_bad_feature_names_its_source_itself_and_the_features(bad, as_argument):
    environ = {} if as_argument else {"PRECISION_SHIM_FEATURES": bad}
    with pytest.raises(SettingsError) as caught:
        resolve(features=bad if as_argument else None, environ=environ)
    message = str(caught.value)
    assert ("install(features=" if as_argument else "PRECISION_SHIM_FEATURES") in message
    assert repr(bad.split(",")[-1].lstrip("-")) in message
    assert all(name in message for name in FEATURES)


def test_features_as_an_argument_win():
    environ = {"PRECISION_SHIM_FEATURES": "fp16-scaling"}
    assert resolve(environ=environ).features == ("fp16-scaling",)
    assert resolve(features="bf16-dispatch", environ=environ).features == ("bf16-dispatch",)
    assert resolve(features=[], environ=environ).features == ()
    assert resolve(features="", environ=environ).features == FEATURES


@pytest.mark.parametrize("value", ["verl, SkyRL,verl", ["verl", "skyrl"]])
def test_framework_lists(value):
    known = ("skyrl", "torchtitan", "verl")
    settings = resolve(frameworks=value, known_frameworks=known, environ={})
    assert settings.frameworks == ("verl", "skyrl")
    assert settings.given == {"PRECISION_SHIM_FRAMEWORKS": "verl,skyrl"}


def test_frameworks_as_an_argument_win():
    environ = {"PRECISION_SHIM_FRAMEWORKS": "verl"}
    assert resolve(environ=environ).frameworks == ("verl",)
    assert resolve(frameworks=["skyrl"], environ=environ).frameworks == ("skyrl",)


@pytest.mark.parametrize("as_argument", [True, False])
def test_an_unknown_framework_names_its_source_itself_and_the_known(as_argument):
    known = ("verl", "skyrl")
    bad = "verl,areal"
    environ = {} if as_argument else {"PRECISION_SHIM_FRAMEWORKS": bad}
    with pytest.raises(SettingsError) as caught:
        resolve(frameworks=bad if as_argument else None, known_frameworks=known, environ=environ)
    message = str(caught.value)
    source = "install(frameworks=" if as_argument else "PRECISION_SHIM_FRAMEWORKS"
    assert re.search(rf"{re.escape(source)}.*'areal'.*skyrl, verl", message)


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("PRECISION_SHIM_OPTIMISER_STATES", "PRECISION_SHIM_OPTIMIZER_STATES"),
        ("PRECISION_SHIM_FEATURE", "PRECISION_SHIM_FEATURES"),
        ("PRECISION_SHIM_grad_bucket", ""),
        ("PRECISION_SHIM_XYZ", ""),
    ],
)
def test_a_variable_that_there_is_not_is_an_error_that_names_the_nearest_first(wrong, meant):
    environ = {"PRECISION_SHIM": "1", "PRECISION_SHIM_LOG": "debug", "PRECISION_SHIMMER": "other"}
    assert resolve(environ=environ)["log"] == "debug"
    with pytest.raises(SettingsError) as caught:
        resolve(environ={**environ, wrong: "auto"})
    message = str(caught.value)
    question = f"; did you mean {meant}?" if meant else "."
    assert message.startswith(f"{wrong} is no variable of precision_shim{question} Allowed: ")
    for row in TABLE.values():
        assert row.variable in message.partition("Allowed: ")[2]


def test_a_directory_is_made_absolute_because_workers_start_elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert resolve(settings={"audit_dir": "audits"})["audit_dir"] == str(tmp_path / "audits")
    assert resolve(settings={"audit_dir": tmp_path})["audit_dir"] == str(tmp_path)
    environ = {"PRECISION_SHIM_AUDIT_DIR": "~/audits"}
    assert resolve(environ=environ)["audit_dir"] == "/home/me/audits"
    assert resolve(settings={"audit_dir": ""})["audit_dir"] == ""
