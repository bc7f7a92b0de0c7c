"""The plan refuses none of the configs that torchtitan ships."""

from __future__ import annotations

import ast
import importlib
import re
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import distribution, version
from importlib.util import find_spec
from pathlib import Path

import pytest

from precision_shim_tools.plan.torchtitan import newer_gpu

from ..plan.shipped import Recipe, hold
from .absent import standing_in

UNPLANNED = {
    "transformers": "train models of transformers, which is not installed",
    "DistMuon": "train with Muon",
}
KEY = re.compile("precision|dtype|float|quant|converter|optimizer|lora", re.IGNORECASE)


@pytest.fixture
def importable(torchtitan: None) -> Iterator[None]:
    """Stand in for the packages that torchtitan's models call, and their configs do not."""
    with standing_in("vllm", "renderers", "transformers", "torchvision", "fla", "math_verify"):
        yield


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("torchao") is None, reason="needs torchao, for recipes in fp8 and fp4"
)
def test_recipes(importable: None) -> None:
    site = Path(str(distribution("torchtitan").locate_file("")))
    files = [
        *site.glob("torchtitan/**/config_registry.py"),
        *site.glob("torchtitan_recipes/**/*.py"),
    ]
    recipes = {name: one for file in sorted(files) for name, one in of_module(file, site)}
    hold(f"torchtitan {version('torchtitan')}", recipes, UNPLANNED)


def of_module(file: Path, site: Path) -> Iterator[tuple[str, Recipe]]:
    """One launch line for each set of keys on precision."""
    module = ".".join(file.relative_to(site).with_suffix("").parts)
    text, alike = file.read_text("utf-8"), defaultdict[tuple[str, ...], list[str]](list)
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.returns and not node.name.startswith("_"):
            if node.args.args or node.args.kwonlyargs:
                continue
            lines = (ast.get_source_segment(text, node) or "").splitlines()[1:]
            alike[tuple(one.strip() for one in lines if KEY.search(one))].append(node.name)
    for config, *others in alike.values():
        words = ["-m", "torchtitan.train", "--module", module, "--config", config]
        yield (
            f"{module}:{config}",
            Recipe(["torchrun", *gpus(module, config), *words], 1 + len(others)),
        )


def gpus(module: str, config: str) -> list[str]:
    """torchrun's option for 8 GPUs, if the config leaves their number to the command line."""
    try:
        with newer_gpu():
            made = getattr(importlib.import_module(module), config)()
        left = made.parallelism.data_parallel_shard_degree < 1
    except (AttributeError, ImportError, ValueError):  # an RL config, or one that the plan refuses
        return []
    return ["--nproc-per-node=8"] if left else []
