"""Read the model of one of vLLM's workers, without changing it; vLLM calls ``read_model``.

Each worker imports this module to unpickle ``read_model``, so the module imports little itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

MOST_TENSORS, MOST_ELEMENTS = 256, 512
"""Maximum number of sampled parameters, and of sampled elements per parameter."""


_UNQUANTISED = ("UnquantizedLinearMethod", "UnquantizedFusedMoEMethod")
_CACHE = "KVCacheMethod"
"""Suffix of vLLM's class names for quantized attention caches, whose parameters are scales."""

_LISTS = ("ignored_layers", "modules_to_not_convert", "exclude_modules")
"""Attributes in which vLLM's quantisation configs list exactly the layers that stay unquantised."""


def ignored_layers(quant_config: Any) -> list[str] | None:
    """The layers that a vLLM config leaves unquantised; ``None`` if the config has no such list."""
    names = (*_LISTS, "ignore") if _targets_kinds(quant_config) else _LISTS
    for name in names:
        found = getattr(quant_config, name, None)
        if isinstance(found, (list, tuple)):
            return [str(entry) for entry in found]
    return None


def _targets_kinds(quant_config: Any) -> bool:
    """Whether a quantisation config targets layer classes, so that its ``ignore`` is complete."""
    targets = getattr(quant_config, "target_scheme_map", None)
    return isinstance(targets, Mapping) and all(str(target).isidentifier() for target in targets)


def read_model(model: torch.nn.Module) -> dict[str, Any]:
    """Read dtypes, quantised layers, KV cache and a sample of the weights, as plain data.

    The host waits for the device only once.

    Args:
        model: the model of a worker.
    """
    quantised, plain, scales, caches = [], [], [], set()
    for name, module in model.named_modules():
        method = type(getattr(module, "quant_method", None)).__name__
        if method in _UNQUANTISED:
            plain.append(name)
        elif method.endswith(_CACHE):
            scales.append(name)
        elif method.endswith("Method") and not method.startswith("Unquantized"):
            quantised.append(name)
        caches |= {str(cache.dtype) for cache in _tensors(vars(module).get("kv_cache"))}
    skipped = tuple(f"{name}." for name in (*quantised, *scales))
    parameters = {
        name: (str(parameter.dtype), parameter.numel(), name.startswith(skipped))
        for name, parameter in model.named_parameters()
    }
    sampled = [
        parameter
        for name, parameter in model.named_parameters()
        if not parameters[name][2] and parameter.numel() and parameter.dtype.itemsize > 1
    ]
    counts = [count_exact(parameter) for parameter in sampled[:: len(sampled) // MOST_TENSORS + 1]]
    exact, normal = torch.stack(counts).sum(0).tolist() if counts else (0, 0)
    return {
        "parameters": parameters,
        "quantised": quantised,
        "plain": plain,
        "kv_cache": sorted(caches),
        "ignored": ignored_layers(getattr(model, "quant_config", None)),
        "exact": exact,
        "sampled": normal,
    }


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.numel() else []
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _tensors(each)]
    return []


def count_exact(parameter: torch.Tensor) -> torch.Tensor:
    """Sample values in fp16's normal range; count those exact in bf16, and count all."""
    flat = parameter.detach().reshape(-1)
    wide = flat[:: flat.numel() // MOST_ELEMENTS | 1].float()
    normal = wide.abs() >= 2.0**-14
    exact = normal & (wide == wide.bfloat16().float())
    return torch.stack([exact.sum(), normal.sum()])
