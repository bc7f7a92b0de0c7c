"""A framework that must be named, because "all frameworks" does not include it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import precision_shim
from precision_shim.errors import SettingsError
from precision_shim.process import registry, session, settings, startup
from precision_shim.process.in_force import asked_for, offered
from precision_shim_tools.cli import doctor

NAME = "megatron"


def test_all_does_not_mean_it() -> None:
    known = registry.entries(third_party=False)
    everything = settings.resolve(environ={}, known_frameworks=known)
    named = settings.resolve(frameworks=NAME, environ={}, known_frameworks=known)
    assert known[NAME].by_name
    assert not asked_for(everything, NAME)
    assert asked_for(named, NAME)
    assert set(known) - set(offered(known, everything)) == {NAME}
    assert set(offered(known, named)) == set(known)
    assert NAME not in offered(known, None)


def test_its_package_is_waited_for_only_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRECISION_SHIM_FRAMEWORKS", raising=False)
    assert NAME not in startup._wake_words()
    monkeypatch.setenv("PRECISION_SHIM_FRAMEWORKS", "verl,Megatron")
    assert NAME in startup._wake_words()


def test_status_and_in_force(shim: Callable[..., Any]) -> None:
    assert NAME not in shim(export=False).frameworks
    assert not session.in_force(NAME, "fp16-scaling", NAME)
    status = precision_shim.install(frameworks=NAME, export=False)
    assert status.frameworks[NAME].state == "absent"  # no Megatron is installed here
    assert session.in_force(NAME, "fp16-scaling", NAME)
    with pytest.raises(SettingsError, match=r"did you mean megatron\?"):
        precision_shim.install(frameworks="megatrn", export=False)


def test_the_doctor_says_that_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRECISION_SHIM_FRAMEWORKS", raising=False)
    assert NAME not in doctor.examine()[0]["frameworks"]
    monkeypatch.setenv("PRECISION_SHIM_FRAMEWORKS", NAME)
    found, _ = doctor.examine()
    assert found["frameworks"][NAME]["state"] == "absent"
    assert any(f"names {NAME}, which is not installed" in one for one in found["problems"])
