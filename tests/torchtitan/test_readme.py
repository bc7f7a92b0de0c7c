"""README's line for torchtitan: its command line takes it, with the shim and not without."""

from __future__ import annotations

from typing import Any

import pytest

from ..readme_lines import overrides
from .test_names import parse


def test_the_line_is_taken(torchtitan: None, shim: Any) -> None:
    (given,) = overrides("torchtitan", "torchtitan.train")
    with pytest.raises(SystemExit):
        parse(*given)
    shim()
    assert parse(*given).training.mixed_precision_param == "float16"
