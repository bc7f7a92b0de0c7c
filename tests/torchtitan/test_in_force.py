"""Whether a feature is in force: worker, doctor, plan and checkpoint doctor say the same."""

from __future__ import annotations

from ..in_force import disagreements


def test_all_say_what_the_worker_says() -> None:
    assert disagreements("torchtitan") == []
