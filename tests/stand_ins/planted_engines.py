"""The files of vLLM and of SGLang that the shim reads: the LM head's, and the choice of a dtype's.

Neither engine is installed in the environments of the frameworks; `tests/vllm` has the real vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

FOLDERS = {"vllm": "vllm/model_executor/layers", "sglang": "sglang/srt/layers"}
NEW = {"vllm": "x = 'head_dtype'", "sglang": "x = 'enable_fp32_lm_head'"}
"""Bodies of the class as releases with the option have it."""


CHOICES = {
    "vllm": {
        "vllm/config/model.py": """
from absent import current_platform, Config
from vllm.convertor import Convertor

REFUSED = {"gemma2": "it overflows"}

def _check_valid_dtype(model_type: str, dtype: Config):
    if dtype == torch.float16 and model_type in REFUSED:
        raise ValueError(REFUSED[model_type])

def _get_and_verify_dtype(model_id, config, dtype, *, is_pooling_model, revision=None):
    found = Convertor.dtype_of(config, model_id)
    if found == torch.float32 or config.model_type in REFUSED:
        return current_platform.supported_dtypes[0]
    return found
""",
        "vllm/convertor.py": """
from typing import final
from .files import get_safetensors_params_metadata, _SAFETENSORS_TO_TORCH_DTYPE

@final
class Convertor:
    @classmethod
    def dtype_of(cls, config, model_id):
        for one in (config, config.get_text_config()):
            if one.dtype is not None:
                return one.dtype
        read = get_safetensors_params_metadata(model_id, revision=None).values()
        held = [_SAFETENSORS_TO_TORCH_DTYPE[one["dtype"]] for one in read]
        return held[0] if held else torch.float32
""",
    },
    "sglang": {
        "sglang/srt/configs/model_config.py": """
from absent import make_logger
from sglang.srt.utils import get_hf_text_config

logger = make_logger(__name__)

def _get_and_verify_dtype(config, dtype):
    if config.dtype in (None, torch.float32):
        logger.info("downcast")
        return torch.bfloat16 if config.model_type.startswith("gemma") else torch.float16
    return config.dtype
""",
        "sglang/srt/utils/__init__.py": "from .common import *",
        "sglang/srt/utils/common.py": """
def get_hf_text_config(config):
    return getattr(config, "text_config", config)
""",
    },
}
"""Files with functions of the engines' names that choose alike; no test could import them."""


def plant_choices(folder: Path, patch: pytest.MonkeyPatch, **texts: str) -> None:
    """Write the files with the engines' functions, or with ``texts``, and put them on the path."""
    for name, files in CHOICES.items():
        _write(folder, {file: texts.get(name, text) for file, text in files.items()}, patch)


_ROUTER = """
class SparseBlock(nn.Module):
    def __init__(self, config):
        self.gate = ReplicatedLinear(config.hidden_size, config.num_experts{})

class ToyMoe(nn.Module):
    pass

EntryClass = [Other, ToyMoe]
"""
ROUTERS = {
    "vllm/model_executor/models/registry.py": '_MODELS = {"ToyMoe": ("toy_moe", "ToyMoe")}',
    "vllm/model_executor/models/toy_moe.py": _ROUTER.format(""),
    "sglang/srt/models/toy_moe.py": _ROUTER.format(", params_dtype=torch.float32"),
    "sglang/srt/models/toy.py": "EntryClass = ToyMoeOther",
    "model/config.json": json.dumps({"architectures": ["ToyMoe"], "num_experts": 8}),
}
"""A model with experts; its router computes in fp32 in SGLang, in the model's dtype in vLLM."""


def plant_routers(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """Write the files with a router, put them on the path, and return the model's folder."""
    _write(folder, ROUTERS, patch)
    return folder / "model"


def _write(folder: Path, files: Mapping[str, str], patch: pytest.MonkeyPatch) -> None:
    for file, text in files.items():
        place = folder / file
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
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
