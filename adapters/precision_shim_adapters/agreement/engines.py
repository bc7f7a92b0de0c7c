"""Ask the source of the installed vLLM or SGLang which dtype it chooses, and which it refuses.

Nothing is imported: of the engine's modules only the asked function runs, with what it names of
these modules. What an engine that is not installed here does is not known.
"""

from __future__ import annotations
import __future__

import ast
import copy
import logging
import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from importlib.util import resolve_name
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from precision_shim.adapting import version_of, versioned
from precision_shim.precision.dtypes import DTYPES, name_of, parse_dtype, read_dtype
from precision_shim.seams import find_spec

from .engine_names import SGLANG, TEXT_PART, VERIFY, VLLM


class _Config(SimpleNamespace):
    """A model's config as the engines get it from transformers, or a section of it."""

    def __init__(self, **keys: Any) -> None:
        dtype = parse_dtype(str(keys.get("dtype") or keys.get("torch_dtype")))
        inner = (name for name in keys if name.endswith("_config") and isinstance(keys[name], dict))
        keys |= {name: _Config(**keys[name]) for name in inner}
        defaults = {"architectures": None, "model_type": ""}
        super().__init__(**{**defaults, **keys, "dtype": dtype, "torch_dtype": dtype})

    def get_text_config(self) -> _Config:
        """The part of a multimodal model that generates, as transformers' method returns it."""
        found: _Config = getattr(getattr(self, "thinker_config", self), "text_config", self)
        return found


_GIVEN: Mapping[str, Any] = {
    "torch": torch,
    "logger": logging.Logger("silent", logging.CRITICAL + 1),
    "PretrainedConfig": _Config,
    "current_platform": SimpleNamespace(
        supported_dtypes=[torch.bfloat16, torch.float16, torch.float32],
        get_device_name=str,
        get_device_capability=lambda: None,
    ),
}
"""What the engines' functions get in place of other packages, and of this host: for vLLM a GPU with
bf16, as the job's GPUs."""


def chosen_by(backend: str, config: Mapping[str, Any], stored: Collection[str]) -> str:
    """Canonical name of the dtype that ``auto`` means to the installed engine; empty if unknown.

    ``config`` is what stands in the model's ``config.json``, and ``stored`` are the canonical names
    of the dtypes in its files.
    """
    files = {name: {"dtype": name} for name in stored}
    given = {
        "get_safetensors_params_metadata": lambda model, **named: files,
        "_SAFETENSORS_TO_TORCH_DTYPE": DTYPES,
    }
    model = _Config(**config)
    try:
        if backend == "vllm":
            found = _run(VLLM, VERIFY, "", model, "auto", is_pooling_model=False, given=given)
        else:
            found = _run(SGLANG, VERIFY, _run(SGLANG, TEXT_PART, model), "auto")
        return name_of(found)
    except Exception:  # another release's function may need anything
        return ""


def refusal_of_fp16(backend: str, model_type: str) -> str:
    """The installed engine's reason not to run a model in fp16; empty if it has or tells none."""
    if backend != "vllm" or not model_type:
        return ""
    try:
        _run(VLLM, "_check_valid_dtype", model_type, torch.float16)
    except ValueError as error:
        return f"{versioned('vllm')} refuses to run {model_type} in fp16: {error}"
    except Exception:
        pass
    return ""


def gate_dtype(backend: str, config: Mapping[str, Any]) -> str:
    """Canonical name of the dtype of a router's logits in an engine's code for a model.

    ``"model"`` stands for the model's dtype; empty if the installed source does not tell.
    """
    try:
        (kind,) = config["architectures"]
        module = _module_of(backend, kind)
        parts = _parts(module)
        made = [(_text(one.targets[0]), one.value) for one in parts if isinstance(one, ast.Assign)]
        gates = [value for name, value in made if name in ("self.gate", "self.router")]
        names = [name for name, _ in made]
        once = {name: value for name, value in made if names.count(name) == 1}
        (found,) = {_of_gate(one, once, module, config) for one in gates}
        return found
    except Exception:  # another release's source may have anything
        return ""


def _module_of(backend: str, kind: str) -> str:
    """The module of an engine that has a model's class: vLLM lists it, SGLang looks into each."""
    models = {"vllm": "vllm.model_executor.models", "sglang": "sglang.srt.models"}[backend]
    if backend == "vllm":
        tables = [one for one in _parts(f"{models}.registry") if isinstance(one, ast.Dict)]
        rows = (row for table in tables for row in zip(table.keys, table.values, strict=True))
        file = next(ast.literal_eval(value)[0] for key, value in rows if _text(key) == repr(kind))
        return f"{models}.{file}"
    spec: Any = find_spec(models)
    files = Path(spec.submodule_search_locations[0]).glob("*.py")
    entry = re.compile(rf"^EntryClass\b[^=]*=[^=]*\b{kind}\b", re.MULTILINE)
    return next(f"{models}.{one.stem}" for one in files if entry.search(one.read_text("utf-8")))


def constant_of(module: str, name: str) -> Any:
    """What the source of an installed module binds to a name; ``None`` if that is not known."""
    try:
        return _run(module, name, given={"copy": copy})
    except Exception:  # the module may be missing, and another release's may have anything
        return None


def _of_gate(call: Any, made: Mapping[str, ast.expr], module: str, config: Any) -> str:
    if _text(call.func) not in ("ReplicatedLinear", "GateLinear", "nn.Linear"):
        raise ValueError
    found = set()
    for value in [one.value for one in call.keywords if one.arg.endswith("dtype")]:
        value = made.get(_text(value), value)  # noqa: PLW2901
        if isinstance(value, ast.Call):  # a function of the module, which asks the model's config
            found.add(_run(module, _text(value.func), _Config(**config)))
        else:
            found.add(read_dtype(_text(value)))
    (one,) = found or {None}
    if isinstance(one, str):  # a name whose value is decided elsewhere
        raise ValueError
    return name_of(one) if one else "model"


def _parts(module: str) -> list[ast.AST]:
    statements = [one for one in _bound(module).values() if isinstance(one, ast.stmt)]
    return [part for one in statements for part in ast.walk(one)]


def _text(node: ast.AST | None) -> str:
    return ast.unparse(node) if node else ""


def not_known(backend: str) -> str:
    """Why the installed engine's choice is not known here."""
    if version_of(backend, (backend,)) is None:
        return f"not known here: {backend} is not installed in this environment"
    return f"not known here: the source of {versioned(backend)} does not tell"


def _run(module: str, name: str, *args: Any, given: Mapping[str, Any] = {}, **named: Any) -> Any:
    """Call a function of a module's source, or return a constant.

    What the run names is taken from the sources.

    Raises:
        StopIteration: a name is in none of the sources that were read.
    """
    scope, places, wanted = {**_GIVEN, **given}, [module], [name]
    flags = __future__.annotations.compiler_flag  # annotations name classes of other modules
    while True:
        try:
            if not wanted:
                found = scope[name]
                return found(*args, **named) if callable(found) else found
            place, node = next(filter(None, (_find(one, wanted[-1]) for one in reversed(places))))
            places.append(place)
            exec(compile(ast.Module([node], []), place, "exec", flags, dont_inherit=True), scope)
            wanted.pop()
        except NameError as error:  # noqa: PERF203
            if error.name in (*wanted, *scope):
                raise
            wanted.append(str(error.name))


def _find(module: str, name: str) -> tuple[str, ast.stmt] | None:
    """The module that binds what a module has under a name, and the statement that binds it."""
    bound = _bound(module)
    found = bound.get(name)
    if isinstance(found, ast.stmt):
        return module, found
    others = [found] if found else [(star[1:], name) for star in bound if star[0] == "*"]
    return next(filter(None, (_find(*one) for one in others)), None)


@lru_cache(maxsize=64)
def _bound(module: str) -> dict[str, Any]:
    """Map the names of a module to statements of its source, or to another module and its name.

    A module whose names are all imported has a star before its name.
    """
    spec: Any = find_spec(module)
    bound: dict[str, Any] = {}
    for node in ast.parse(spec.loader.get_source(module)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound[node.name] = node
        elif isinstance(node, ast.ImportFrom):
            place = resolve_name("." * node.level + (node.module or ""), spec.parent)
            for one in node.names:
                as_name = f"*{place}" if one.name == "*" else one.asname or one.name
                bound[as_name] = place, one.name
        else:
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            bound.update({one.id: node for one in targets if isinstance(one, ast.Name)})
    return bound
