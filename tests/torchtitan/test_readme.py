"""README's line for torchtitan: its command line takes it, with the shim and not without."""

from __future__ import annotations

from typing import Any

import pytest

from ..readme_lines import on_start_page, overrides
from .test_names import parse


def test_the_line_is_taken(torchtitan: None, shim: Any) -> None:
    (given,) = overrides("torchtitan", "torchtitan.train")
    with pytest.raises(SystemExit):
        parse(*given)
    shim()
    assert parse(*given).training.mixed_precision_param == "float16"


def test_the_start_page_is_taken(torchtitan: None, shim: Any) -> None:
    alone, fp16, rl = on_start_page("torchtitan", "torchtitan.train")
    shim()
    for given, dtype in ((alone, "bfloat16"), (fp16, "float16")):
        assert parse(*given[4:]).training.mixed_precision_param == dtype
    assert given[:4] == ["--module", "qwen3", "--config", "qwen3_debugmodel"]
    assert [word.partition("=")[0] for word in rl] == [
        "--trainer.training.mixed_precision_param",
        "--generator.model_dtype",
    ]
