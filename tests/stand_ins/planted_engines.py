"""The files of vLLM and of SGLang that the shim reads: the LM head's, and the choice of a dtype's.

Neither engine is installed in the environments of the frameworks; `tests/vllm` has the real vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

FOLDERS = {"vllm": "vllm/model_executor/layers", "sglang": "sglang/srt/layers"}
NEW = {"vllm": "x = 'head_dtype'", "sglang": "x = 'enable_fp32_lm_head'"}
"""Bodies of the class as releases with the option have it."""


CHOICES = {
    "vllm": (
        "vllm/config/model.py",
        """
from absent import current_platform, Config

REFUSED = {"gemma2": "it overflows"}

def _check_valid_dtype(model_type: str, dtype: Config):
    if dtype == torch.float16 and model_type in REFUSED:
        raise ValueError(REFUSED[model_type])

def _resolve_auto_dtype(model_type, config_dtype, *, is_pooling_model):
    if config_dtype == torch.float32 or model_type in REFUSED:
        return current_platform.supported_dtypes[0]
    return config_dtype
""",
    ),
    "sglang": (
        "sglang/srt/configs/model_config.py",
        """
from absent import make_logger

logger = make_logger(__name__)

def _get_and_verify_dtype(config, dtype):
    if dtype == "auto" and config.dtype == torch.float32:
        logger.info("downcast")
        return torch.bfloat16 if config.model_type.startswith("gemma") else torch.float16
    return config.dtype
""",
    ),
}
"""Functions of the engines' names that choose alike, in files that no test could import."""


def plant_choices(folder: Path, patch: pytest.MonkeyPatch, **texts: str) -> None:
    """Write the files with the engines' functions, or with ``texts``, and put them on the path."""
    for name, (file, text) in CHOICES.items():
        place = folder / file
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(texts.get(name, text))
        for above in place.relative_to(folder).parents[:-1]:
            (folder / above / "__init__.py").touch()
    patch.syspath_prepend(folder)


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
