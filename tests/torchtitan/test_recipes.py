"""The plan refuses none of the configs that torchtitan ships."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..plan.shipped import hold
from .test_pages import importable  # noqa: F401

UNPLANNED = (
    "pipelines are not planned",
    "torchao is not installed",
    "No module named",
    "only supported (on|for)",  # GPUs of a newer kind
    "initial_load_path must be an absolute path",  # of a file that the framework's CI makes
)


KEY = re.compile("precision|dtype|float|quant|converter|optimizer|lora", re.IGNORECASE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "pattern", ["torchtitan/**/config_registry.py", "torchtitan_recipes/**/*.py"]
)
def test_recipes(pattern: str) -> None:
    hold(dict(lines(pattern)), *UNPLANNED, least=0.5)  # many are pipelines


def lines(pattern: str) -> Iterator[tuple[str, list[str]]]:
    """One launch line for each module that can be imported here, and set of keys on precision."""
    import torchtitan

    site = Path(torchtitan.__file__).parents[1]
    seen: set[tuple[str, ...]] = set()
    for file in sorted(site.glob(pattern)):
        name = ".".join(file.relative_to(site).with_suffix("").parts)
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:  # of transformers, fla and others
            continue
        for config, make in inspect.getmembers(module, inspect.isfunction):
            mine = make.__module__ == name and not config.startswith("_")
            if not mine or inspect.signature(make).parameters:
                continue
            source = inspect.getsource(make).splitlines()[1:]
            keys = (name, *(one.strip() for one in source if KEY.search(one)))
            if keys not in seen:
                seen.add(keys)
                words = ["-m", "torchtitan.train", "--module", name, "--config", config]
                yield f"{name}:{config}", ["torchrun", *gpus(make), *words]


def gpus(make: Any) -> list[str]:
    """torchrun's option for 8 GPUs, if the config leaves their number to the command line."""
    try:
        left = make().parallelism.data_parallel_shard_degree < 1
    except (AttributeError, ImportError, ValueError):  # an RL config, or one that the plan refuses
        return []
    return ["--nproc-per-node=8"] if left else []
