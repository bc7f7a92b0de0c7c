"""The one reader of NeMo-RL's config, for workers, the driver and the plan.

NeMo-RL accepts any key. Which key it reads from which section is in its source.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from precision_shim.adapting import look, parse_settings, versioned
from precision_shim.adapting.dtypes import (
    ALIASES,
    COMPUTES,
    Written,
    any_dtype,
    name_of,
    names_precision,
    parse_dtype,
    values_of,
)
from precision_shim.adapting.rollouts import AUTO, ENGINE_NAMES, FP8, Engine, Format, formats

from ..agreement.engines import constant_of
from ..agreement.names import engine_name, with_rounded
from ..megatron import RequestedConfig
from ..megatron.policy.formats import read_format
from ..torch_fp16 import SETTINGS

FRAMEWORK = "nemo-rl"
DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")
}
"""The dtype names that NeMo-RL accepts; for other names NeMo-RL raises KeyError or ValueError."""

_LORA = "nemo_rl.models.policy:LoRAConfig"  # since 0.5
BLOCK = "precision_shim"
"""Key of the shim's optional block in the config of a policy or value model."""

PLACE = "policy.generation"
SECTIONS = {
    "vllm": ("vllm_cfg", "precision"),
    "dynamo": ("vllm_cfg", "precision"),  # Dynamo runs vLLM
    "sglang": ("sglang_cfg", "dtype"),
    "trtllm": ("trtllm_cfg", "precision"),
}
"""Maps a rollout engine to the section and the key of its dtype in the config."""

Keys = tuple[str, ...]
"""A key and, before it, the sections in which it is."""

_MEANT = {
    **dict.fromkeys(("precision", "dtype", "param_dtype"), COMPUTES),
    **{f"{moment}_dtype": moment for moment in ("exp_avg", "exp_avg_sq")},
    **dict.fromkeys(("reduce_dtype", "output_dtype"), ""),
}
"""Maps names of dtype keys to what they set."""

_READS = re.compile(
    r"""\b(?=(\w+)[\s"'\])]*(?:(?:\[|\.(?:get|pop|setdefault)\()\s*["']|\.)(\w+))"""
)
"""Finds a section and a key that is read from it, such as ``config["megatron_cfg"]["fp8"``.

It consumes no text, because a key may be the section of the next key."""
_PASSED = re.compile(r"""(?:\*\*|\.update\()[\w.]*?(\w+)(?![\w.])((?:\[["']\w+["']\])*)""")
"""Matches a section that is passed on whole, such as ``**config["megatron_cfg"]["optimizer"]``."""


def read_requested(
    config: Mapping[str, Any], subject: str, megatron_fsdp: bool, trains: bool
) -> RequestedConfig:
    """Read a model's ``RequestedConfig`` from a worker's policy config."""
    role = "value" if subject == "value" else "policy"
    where = f"{versioned(FRAMEWORK)}, {role}"
    section = config["megatron_cfg"]
    optimizer = section.get("optimizer") or {}
    ddp = section.get("distributed_data_parallel_config") or {}
    blockers = []
    fp8, bucket = section.get("fp8_cfg") or {}, "grad_reduce_in_fp32"
    if fp8.get("enabled") and fp8.get("fp8_recipe") != "delayed":
        blockers.append(f"fp8_cfg.fp8_recipe is {fp8.get('fp8_recipe')!r}, not 'delayed'")
    if megatron_fsdp:
        blockers.append("Megatron-FSDP keeps gradients and states in its own buffers")
    return RequestedConfig(
        where=f"{where}.megatron_cfg.optimizer",
        subject=subject,
        asked={str(key): optimizer[key] for key in optimizer},
        declared=parse_dtype(str(config["precision"])),
        blockers=tuple(blockers),
        bucket_in_fp32=bool(ddp[bucket]) if bucket in ddp else None,
        scaler=config.get(BLOCK) or {},
        scaler_where=f"{where}.{BLOCK}",
        wrote=tuple(written(config, role, sharded=False)),
        unchecked=("params_dtype",),  # NeMo-RL's YAMLs set params_dtype; Megatron ignores it
        trains=trains,
    )


def scaled_because(name: str) -> str:
    """The reported reason for scaling a model's loss; ``name`` is the model's key."""
    return f"{name}.precision is float16, and NeMo-RL does not scale the loss"


def read_section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Read a config's optional scaler settings, with the fields of ``ScalerSettings`` as keys.

    Raises:
        SettingsError: a value is not allowed; the message has key, value and allowed values.
    """
    where = f"{versioned(FRAMEWORK, called='NeMo-RL')}, {name}.{BLOCK}"
    values = parse_settings(config.get(BLOCK) or {}, SETTINGS.values(), where)
    return {ours: values[key] for ours, key in SETTINGS.items() if key in values}


def written(config: Mapping[str, Any], name: str, *, sharded: bool = True) -> Iterator[Written]:
    """Yield a model's dtype keys besides Megatron's; ``name`` is the model's key.

    ``sharded``: whether a DTensor worker trains the model, and not Megatron.
    """
    if sharded and config.get("precision") is not None:
        yield Written(f"{name}.precision", config["precision"], COMPUTES)
    loaded = (config.get("hf_config_overrides") or {}).get("dtype")
    if loaded is not None:
        yield Written(f"{name}.hf_config_overrides.dtype", loaded, "params")
    others = dict(unread(config, BLOCK, "sglang_cfg"))  # SGLang reads its section
    if sharded:
        for key, value in ((config.get("megatron_cfg") or {}).get("optimizer") or {}).items():
            if key.endswith("_dtype") and key != "params_dtype":  # which NeMo-RL's YAML files have
                others["megatron_cfg", "optimizer", key] = value
    for keys, value in others.items():
        yield _unread(name, keys, value, str(config.get("precision")) if sharded else None)
    automodel = (config.get("dtensor_cfg") or {}).get("automodel_kwargs") or {}
    backend = automodel.get("backend")
    if sharded and isinstance(backend, Mapping) and backend.get("te_fp8") is not None:
        # Only Automodel's recipes enter TransformerEngine's autocast, not the model.
        key = f"{name}.dtensor_cfg.automodel_kwargs.backend.te_fp8"
        yield Written(key, backend["te_fp8"], read=False)
    adapters = read_lora(config, "dtensor_cfg.lora_cfg")
    if sharded and adapters:
        kind = adapters.get("lora_dtype")
        yield Written(f"{name}.dtensor_cfg.lora_cfg.lora_dtype", kind, "params")


def read_lora(config: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """The section of a model's LoRA adapters at ``place``, such as ``dtensor_cfg.lora_cfg``.

    NeMo-RL gives it to Automodel or Megatron-Bridge; it is empty if the model has no adapters.
    """
    outer, _, inner = place.partition(".")
    found = (config.get(outer) or {}).get(inner)
    if isinstance(found, Mapping) and found.get("enabled") and look(_LORA).found:
        return found
    return {}


def _unread(name: str, keys: Keys, value: object, precision: str | None) -> Written:
    """What the user may mean by a key that NeMo-RL does not read.

    ``precision`` is that of the model's DTensor workers; ``None`` if Megatron trains it.
    """
    sharded, fixed = precision is not None, ""
    (near,) = get_close_matches(keys[-1], _MEANT, 1, 0.8) or ("",)
    sets, needs, place = _MEANT.get(near, ""), "", f"{name}.{'.'.join(keys)}"
    if keys[0] == "generation":
        needs = f"{name}.{'.'.join(keys[:2])}.precision={value}" if sets and len(keys) > 2 else ""
        sets = ""
    elif sets == COMPUTES and sharded:
        dtype = any_dtype(str(value))
        needs = "".join(f"{name}.precision={own}" for own in DTYPES if DTYPES[own] is dtype)
        fixed = name_of(DTYPES[precision]) if precision and precision in DTYPES else ""
    elif sets == COMPUTES:
        sets = "params"
    # NeMo-RL's FSDP reduces gradients, and returns a layer's output, in fp32.
    fixed = "fp32" if sharded and near in ("reduce_dtype", "output_dtype") else fixed
    return Written(place, value, sets, needs, read=False, fixed=fixed)


def unread(
    config: Mapping[str, object], *others: str, anywhere: bool = False
) -> Iterator[tuple[Keys, object]]:
    """Yield the keys on precision that nothing reads, with their values.

    ``others`` are sections that NeMo-RL does not read itself. ``anywhere``: the config is not a
    model's, and a key counts as read if NeMo-RL reads one of this name from any section.
    """
    every = {tuple(key.split(".")): value for key, value in values_of(config)}
    found = {keys: value for keys, value in every.items() if names_precision(keys[-1], value)}
    read, passed = _source() if found else (set(), set())
    names = {name for _, name in read} if anywhere else set()
    for keys, value in found.items():
        section = tuple(map(_section, keys[:-1]))
        ends = [section[:end] for end in range(1, len(section) + 1)]
        known = any(end[-len(one) :] == one for end in ends for one in passed)
        known = known or keys[-1] in names or bool({*others}.intersection(keys))
        if not known and (*(section or ("",))[-1:], keys[-1]) not in read:
            yield keys, value


def _section(name: str) -> str:
    """A section's name as variables have it, too: ``fp8`` for ``fp8_cfg`` and ``fp8_config``."""
    bare = re.sub(r"_?(cfg|config)$", "", name)
    return "" if bare in ("policy", "value") else bare


@functools.cache  # it reads all of NeMo-RL's source
def _source() -> tuple[set[Keys], set[Keys]]:
    """Each section and each key that NeMo-RL reads from it, and the sections it passes on.

    A variable such as ``cfg`` is a model's config, and in a rollout's modules a rollout's.
    """
    read, passed = set[Keys](), set[Keys]()
    spec = find_spec("nemo_rl")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in Path(folder).rglob("*.py"):
            own = "generation" if "generation" in file.parts else ""
            text = file.read_text("utf-8", "replace")
            read.update((_section(name) or own, key) for name, key in set(_READS.findall(text)))
            for name, inner in _PASSED.findall(text):
                names = (_section(one) for one in (name, *re.findall(r"\w+", inner)))
                passed.add(tuple(one for one in names if one))
    # NeMo-RL's GRPO only copies the rollout's section, for its own rollouts.
    return read, passed - {(), ("generation",)}


def is_read(section: str, key: str) -> bool:
    """Whether the installed NeMo-RL reads a key of a section such as ``"megatron"``."""
    return (section, key) in _source()[0]


def format_of(section: Mapping[str, Any], name: str) -> Format | None:
    """What a trained model's quantized layers compute in; ``name`` is the model's key."""
    found = _by_modelopt(section, name)
    cfg = section.get("megatron_cfg") or {}
    fp8 = cfg.get("fp8_cfg") or {}
    if found is None and cfg.get("enabled") and fp8.get("enabled"):
        found = read_format({"fp8": "e4m3", **fp8}, f"{name}.megatron_cfg.fp8_cfg.{{}}")
    return found


def _by_modelopt(section: Mapping[str, Any], name: str) -> Format | None:
    """The format that ModelOpt's recipe of this name gives to the policy or to vLLM."""
    recipe = section.get("quant_cfg")
    if recipe is None:
        return None
    key, entries = f"{name}.quant_cfg={recipe}", _entries(str(recipe))
    if isinstance(entries, list):
        found = formats.of_modelopt(entries, key)
    else:
        named = formats.Quantized(Path(str(recipe)).stem, "by ModelOpt")
        found = Format({"layers": named}, ("its recipe's exceptions",), key)
    if not section.get("real_quant"):
        return found
    utils, key = "nemo_rl.modelopt.utils", f"{key}, {name}.real_quant=True"
    own = section.get("real_quant_ignore") or constant_of(utils, "DEFAULT_NVFP4_IGNORE") or ()
    # NeMo-RL 0.7 gives vLLM this format whatever the recipe is; its main asks the recipe.
    by_recipe = look(f"{utils}:resolve_nvfp4_real_quant_mode").found
    parts = found.parts if by_recipe else {"weights": formats.Quantized("e2m1", formats.NVFP4)}
    return Format(parts, tuple(map(str, own)), key)


def _entries(recipe: str) -> Any:
    """ModelOpt's list of quantizers in a recipe: a constant, a file, or a file of ModelOpt's."""
    found = constant_of("modelopt.torch.quantization.config", recipe)
    if not isinstance(found, Mapping):
        from omegaconf import OmegaConf

        spec = find_spec("modelopt_recipes")
        folders = ["", *((spec.submodule_search_locations or ()) if spec else ())]
        paths = (Path(one, recipe + end) for one in folders for end in ("", ".yaml", ".yml"))
        file = next((path for path in paths if path.is_file()), None)
        found = OmegaConf.to_container(OmegaConf.load(file)) if file else None
    section = found.get("quantize", found) if isinstance(found, Mapping) else {}
    return section.get("quant_cfg")


def _by_vllm(section: Mapping[str, Any], key: str) -> Format:
    """The format of NeMo-RL's fp8 in vLLM; ``key`` is that of the precision."""
    scalings = (formats.MX, formats.MX) if section.get("is_mx") else (formats.BLOCKS, formats.ROWS)
    counts = ((which, section.get(f"num_{which}_layers_in_bf16")) for which in ("first", "last"))
    left_out = [f"the {which} {count} layers" for which, count in counts if count]
    left_out += map(str, section.get("quantization_ignored_layer_kws") or ())
    return Format(formats.in_e4m3(*scalings), tuple(left_out), f"{key}=fp8")


def read_trained(section: Mapping[str, Any], name: str) -> Engine | None:
    """Read the dtype in which a model computes; ``None`` if NeMo-RL does not know its name."""
    dtype, because = computed_in(section, name)
    if dtype is None:
        return None
    format, key = format_of(section, name), f"{name}.precision"
    return Engine(name, name_of(dtype), key, section["precision"], because, format=format)


def computed_in(section: Mapping[str, Any], name: str) -> tuple[torch.dtype | None, str]:
    """The dtype in which a model computes, and why it is not ``precision``, if it is not.

    NeMo-RL gives the parallelizer with which Automodel shards models with expert parallelism no
    dtypes, and this parallelizer then takes bfloat16. The dtype is ``None`` if its name is unknown.
    """
    dtype, sharded = DTYPES.get(section.get("precision", "")), section.get("dtensor_cfg") or {}
    several = int(str(sharded.get("expert_parallel_size") or 1)) > 1 and sharded.get("_v2")
    on_megatron = (section.get("megatron_cfg") or {}).get("enabled")
    if dtype in (None, torch.bfloat16) or not several or on_megatron:
        return dtype, ""
    if not is_read("dtensor", "moe_parallelizer"):  # before 0.6 autocast has ``precision``
        return dtype, ""
    key = f"{name}.dtensor_cfg.expert_parallel_size={sharded['expert_parallel_size']}"
    return torch.bfloat16, f"{key}: NeMo-RL gives Automodel's parallelizer of experts no dtype"


def read_rollout(policy: Mapping[str, Any]) -> Engine | None:
    """Read the dtype of a policy's rollout; ``None`` without a rollout, or if it is not known.

    Raises:
        DtypeError: the rollout's dtype name is unknown.
    """
    trainer, generation = read_trained(policy, "policy"), policy.get("generation")
    if trainer is None or not isinstance(generation, Mapping):
        return None
    backend = str(generation.get("backend"))
    if backend == "megatron":
        because = f"{PLACE}.backend is 'megatron', which computes in {trainer.key}"
        return replace(trainer, subject="rollout", because=because)
    name, field = SECTIONS.get(backend, ("", ""))
    if not name:
        return None
    section, at = generation.get(name) or {}, f"{PLACE}.{name}"
    key, value, because = f"{PLACE}.{name}.{field}", section.get(field), ""
    if value is not None:
        read = engine_name(value, key, versioned(FRAMEWORK), (AUTO, FP8))
        if read == FP8:
            because = f"{key}=fp8, beside which NeMo-RL gives vLLM bfloat16"
    elif name != "sglang_cfg" or name not in generation:
        return None
    else:  # NeMo-RL passes SGLang no dtype
        read, because = AUTO, f"{key} is left out"
    format = _by_vllm(section, key) if read == FP8 else _by_modelopt(generation, PLACE)
    allowed = {"bf16": "bfloat16"} if backend == "dynamo" else ENGINE_NAMES
    own = Engine("rollout", ALIASES.get(read, read), key, value, because, values=allowed)
    options = {"kv_cache_dtype": section.get("kv_cache_dtype")}
    if name == "vllm_cfg" and read != FP8:  # with fp8 NeMo-RL itself writes these vllm_kwargs
        options, at = generation.get("vllm_kwargs") or {}, f"{PLACE}.vllm_kwargs"
    return with_rounded(replace(own, format=format), options, at)


def asked_of(policy: Mapping[str, Any]) -> tuple[str, str] | None:
    """The value and key of the rollout's dtype in a policy's config; ``None`` without rollout."""
    engine = read_rollout(policy)
    if engine is None:
        return None
    return ENGINE_NAMES.get(engine.computes, engine.computes), engine.key
