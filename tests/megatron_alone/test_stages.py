"""The stages of a pipeline decide alike, in Megatron-FSDP too."""

from __future__ import annotations

import pytest

from ..processes.rank_server import rank_server


def test_megatron_fsdp(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The NaN check would end the job on the stage that has no fp16 parameters."""
    with rank_server("tests.megatron_alone.stage_ranks", tmp_path_factory.mktemp("r")) as launch:
        assert launch("fsdp", stages=2) == [False, False]
