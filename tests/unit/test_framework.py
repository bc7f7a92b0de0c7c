"""The records of facts are immutable, and take each field once."""

from __future__ import annotations

from typing import Any

import pytest

from precision_shim.process.framework import Adapter

TINY = Adapter("tiny", "tiny-rl", ("tiny",), tested=("1.0",))


def test_a_copy_differs_in_what_is_named_alone() -> None:
    other = TINY.replace(by_name=True)
    assert vars(other) == {**vars(TINY), "by_name": True}
    assert not TINY.by_name


def test_a_record_is_not_changed() -> None:
    with pytest.raises(AttributeError, match=r"Adapter\.tested: a record is not changed"):
        TINY.tested = ()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "named", "says"),
    [
        (("tiny",), {}, "Adapter needs distribution, packages"),
        (("tiny", "tiny", ()), {"packages": ()}, "takes each of"),
        (("tiny", "tiny", ()), {"test": ()}, "takes each of"),
        (("tiny",) * 20, {}, "takes each of"),
    ],
)
def test_a_wrong_field_is_an_error(values: Any, named: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        Adapter(*values, **named)
