"""The one file of vLLM and of SGLang in which the shim looks for the option of an fp32 LM head.

Neither engine is installed in the environments of the frameworks; `tests/vllm` has the real vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

FOLDERS = {"vllm": "vllm/model_executor/layers", "sglang": "sglang/srt/layers"}
NEW = {"vllm": "x = 'head_dtype'", "sglang": "x = 'enable_fp32_lm_head'"}
"""Bodies of the class as releases with the option have it."""


def plant(folder: Path, patch: pytest.MonkeyPatch, bodies: Mapping[str, str] = NEW) -> None:
    """Write the engines' packages to a folder, and put the folder on the path of modules.

    Args:
        folder: an empty folder.
        patch: takes the folder off the path again.
        bodies: the body of the class ``LogitsProcessor`` by engine.
    """
    for name, body in bodies.items():
        place = folder / FOLDERS[name]
        place.mkdir(parents=True, exist_ok=True)
        (place / "logits_processor.py").write_text(f"class LogitsProcessor:\n    {body}\n")
        while place != folder:
            (place / "__init__.py").touch()
            place = place.parent
    patch.syspath_prepend(folder)
