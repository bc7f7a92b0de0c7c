"""Ask the source of the installed vLLM or SGLang which dtype it chooses, and which it refuses.

Nothing is imported: of the engine's module only the asked function runs, with the functions and
tables of that module that it names. What an engine that is not installed here does is not known.
"""

from __future__ import annotations
import __future__

import ast
import logging
from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch

from precision_shim.adapting import version_of, versioned
from precision_shim.precision.dtypes import CANONICAL, name_of
from precision_shim.seams import definition

from .engine_names import SGLANG, VERIFY, VLLM

_ON_A_GPU = SimpleNamespace(
    supported_dtypes=[torch.bfloat16, torch.float16, torch.float32],
    get_device_name=str,
    get_device_capability=lambda: None,
)
"""The platform that vLLM's function is told: a GPU with bf16, as the job's GPUs, not this host."""


def chosen_by(backend: str, checkpoint: str, model_type: str) -> str:
    """Canonical name of the dtype that ``auto`` means to the installed engine; empty if unknown.

    ``checkpoint`` is the canonical name of the checkpoint's dtype, ``model_type`` the HF config's.
    """
    given = CANONICAL[checkpoint]
    try:
        if backend == "vllm":
            function = _taken(VLLM, "_resolve_auto_dtype")
            found = function(model_type, given, is_pooling_model=False)
        else:
            config = SimpleNamespace(dtype=given, torch_dtype=given, model_type=model_type)
            found = _taken(SGLANG, VERIFY)(config, "auto")
    except Exception:  # another release's function may need anything
        return ""
    return name_of(found)


def refusal_of_fp16(backend: str, model_type: str) -> str:
    """The installed engine's reason not to run a model in fp16; empty if it has or tells none."""
    if backend != "vllm" or not model_type:
        return ""
    try:
        _taken(VLLM, "_check_valid_dtype")(model_type, torch.float16)
    except ValueError as error:
        return f"{versioned('vllm')} refuses to run {model_type} in fp16: {error}"
    except Exception:
        pass
    return ""


def not_known(backend: str) -> str:
    """Why the installed engine's choice is not known here."""
    if version_of(backend, (backend,)) is None:
        return f"not known here: {backend} is not installed in this environment"
    return f"not known here: the source of {versioned(backend)} does not tell"


@lru_cache(maxsize=8)
def _taken(module: str, name: str) -> Callable[..., Any]:
    """Build a function of a module's source, with what it names of that module."""
    found = definition(f"{module}:{name}")
    if found is None:
        raise LookupError(name)
    given: dict[str, Any] = {
        "torch": torch,
        "logger": logging.Logger("silent", logging.CRITICAL + 1),
        "current_platform": _ON_A_GPU,
    }
    body: list[ast.stmt] = []
    wanted = {name}
    for node in reversed(ast.parse(found.text).body):  # what a function names stands above it
        if wanted.difference(given).intersection(_bound(node)):
            body.insert(0, node)
            wanted |= {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    flags = __future__.annotations.compiler_flag  # annotations name classes of other modules
    exec(compile(ast.Module(body, []), module, "exec", flags, dont_inherit=True), given)
    taken: Callable[..., Any] = given[name]
    return taken


def _bound(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]
