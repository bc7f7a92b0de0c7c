"""Check the keys and the values in the sections of a model in verl's config.

In a worker, hydra would raise a TypeError for a key that the section's dataclass lacks. The shim
reads the dataclasses' fields from verl's source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from precision_shim.adapting import look, versioned
from precision_shim.errors import DtypeError
from precision_shim.precision.dtypes import parse_dtype
from precision_shim.precision.effect import Written, values_of
from precision_shim.precision.findings import Problem
from precision_shim_adapters.megatron.policy.optimizer_plan import PRECISION_AWARE_FIELDS
from precision_shim_adapters.torch_fp16.states import fault_of_eps
from precision_shim_adapters.verl.config import MIXED, ModelConfig, has_fields, own_spellings

from ..record import unknown_keys
from ..values import not_built, section_of

_MODULES = ("engine", "optimizer", "actor", "critic")
_HYDRAS = ("_target_", "_convert_", "_recursive_", "_partial_")

where = cache(partial(versioned, "verl"))
"""verl's name and version, for messages."""


def inner(section: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """See ``section_of``."""
    return section_of(section, key, where())


def overridden(section: ModelConfig) -> Iterator[Written]:
    """Yield the dtypes in transformers' config, which FSDP's engines replace by ``model_dtype``."""
    place = f"{section.model_key}.override_config"
    config = inner(section.model, place)
    if "model_config" in config:
        place = f"{place}.model_config"
        config = inner(config, place)
    reads = section.alone and section.has_model_dtype
    for name in ("dtype", "torch_dtype") if reads else ():
        if config.get(name):
            yield Written(f"{place}.{name}", config[name], "params")


def tell_not_built(section: ModelConfig) -> list[str]:
    """Return a note on the dtypes that the user wrote for a model; see ``not_built``."""
    # Not even the dtype of legacy workers' autocast has an effect.
    wrote = list(map(str, replace(section, legacy=False).written()))
    for key, value in values_of(section.optim):
        if key.endswith("_dtype") and value not in (None, "fp32"):
            wrote.append(f"{section.optim_key}.{key}={value}")
    return not_built(section.subject, section.unbuilt, wrote) if section.unbuilt else []


def unknown(section: ModelConfig, *, dispatches: bool) -> Iterator[Problem]:
    """Yield a problem for each key of a model's sections that verl's dataclass lacks.

    Without hydra's ``_target_``, any key is allowed. ``dispatches``: the shim adds verl 0.9's dtype
    fields to ``McoreOptimizerConfig``.
    """
    engine_key, allowed, names = section.engine_key, {}, {}
    sections = {section.role_key: section.role, section.optim_key: section.optim}
    sections[engine_key] = section.engine
    for key, read in sections.items():
        name = names[key] = str(read.get("_target_", "")).rpartition(".")[2]
        looks = [look(f"verl.workers.config.{module}:{name}.__init__") for module in _MODULES]
        allowed[key] = set(next((symbol.parameters for symbol in looks if symbol.found), ()))
        if name == "McoreOptimizerConfig" and dispatches:
            allowed[key].update(PRECISION_AWARE_FIELDS)
    places = {word: f"{key}.{word}" for key, words in allowed.items() for word in words}
    moved = {"fsdp_config": engine_key}
    if section.strategy == "megatron":
        moved = {"fsdp_config": f"{engine_key}.dtype"}
    else:
        need = "--config-name=ppo_megatron_trainer beside it, as only Megatron's optimizer has it"
        moved.update(dict.fromkeys(PRECISION_AWARE_FIELDS, need))
    if section.sharded:
        moved.update({word: f"{engine_key}.mixed_precision.{word}" for word in MIXED})
        if not section.legacy:  # the engine does not read its ``dtype``
            moved["dtype"] = moved["param_dtype"]
    for key, read in sections.items():
        of_section = {word: f"{key}.{word}" for word in allowed[key]}
        there = places | of_section | moved
        for word, value in read.items():
            if isinstance(value, Mapping) and there.get(word, "").endswith(f".{word}"):
                lines = (f"++{there[word]}.{name}={one}" for name, one in value.items())
                there[word] = " ".join(lines)
        # The worker of a reference model renames its keys that begin with log_prob_.
        written = [word for word in read if word not in _HYDRAS and word[:9] != "log_prob_"]
        whose, place = f"{where()}'s {names[key]}", f"{key}.{{}}"
        yield from unknown_keys(written, allowed[key], section.subject, place, whose, places=there)


def check_moments(section: ModelConfig, optimizer: str) -> None:
    """Raise ``DtypeError`` if torch's optimizer cannot step parameters that are stored in fp16."""
    written = inner(section.optim, f"{section.optim_key}.override_optimizer_config")
    eps, stored = written.get("eps", 1e-8), f"{section.engine_key}.model_dtype"
    foreign = (section.optim.get("optimizer_impl") or "torch.optim") != "torch.optim"
    if foreign or written.get("fused") or not isinstance(eps, float):
        return
    fault = fault_of_eps(optimizer, eps)
    if fault:
        raise DtypeError(f"{where()}: {stored}=fp16: {fault}. Set {stored}=fp32.", key=stored)


def check_megatron(section: ModelConfig) -> Iterator[Problem]:
    """Yield the dtypes that verl's fields take only where dtype-coercion is in force.

    Raises:
        DtypeError: verl's configs of a model on Megatron refuse a dtype.
    """
    dtype, names = section.engine.get("dtype", "bfloat16"), own_spellings()
    if dtype not in ("bfloat16", "float16"):
        raise _refused(f"{section.engine_key}.dtype", dtype, "bfloat16 or float16")
    for name in PRECISION_AWARE_FIELDS[1:] if has_fields() else ():
        value, key = section.optim.get(name, "fp32"), f"{section.optim_key}.{name}"
        # YAML reads verl's dtype name "32" as a number.
        dtype_found = parse_dtype(str(value)) if isinstance(value, int | str) else None
        if dtype_found not in (torch.float32, torch.bfloat16):
            raise _refused(key, value, "fp32 or bf16")
        if names and str(value) not in names:
            fault = f"{where()}: {name}={value!r}: verl itself takes {', '.join(names)}"
            remedy = "Write one of these, or let the shim's dtype-coercion act in the job."
            yield Problem("dtype", section.subject, key, fault, remedy)


def _refused(key: str, value: object, allowed: str) -> DtypeError:
    return DtypeError(
        f"{where()}: {key}={value!r}: its worker takes {allowed}. Correct {key}.", key=key
    )
