"""install() and uninstall() in every import order, twice, in threads: no change remains."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from packaging.version import Version

import precision_shim

from .conftest import VERL

MODULES = (
    "megatron.core.optimizer",
    "megatron.core.optimizer.optimizer_config",
    "megatron.core.distributed",
    "megatron.core.distributed.distributed_data_parallel",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.dist_checkpointing",
    "megatron.core.dist_checkpointing.serialization",
    "verl.utils.megatron.optimizer",
    "verl.utils.megatron_utils",
    "verl.workers.config.optimizer",
    "verl.workers.engine.megatron.transformer_impl",
)
CLASSES = {
    "megatron.core.optimizer.distrib_optimizer": "DistributedOptimizer",
    "megatron.core.optimizer.optimizer_config": "OptimizerConfig",
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel",
    "verl.workers.config.optimizer": "McoreOptimizerConfig",
    "verl.workers.engine.megatron.transformer_impl": "MegatronEngine",
}


def namespaces() -> dict[str, dict[str, Any]]:
    found = {name: dict(vars(sys.modules[name])) for name in MODULES}
    for module, name in CLASSES.items():
        found[f"{module}:{name}"] = dict(vars(getattr(sys.modules[module], name)))
    return found


def changes(before: dict[str, dict[str, Any]]) -> list[str]:
    """Names that are new, gone, or bound to another object (wrappers equal their originals)."""
    after = namespaces()
    return [
        f"{place}:{key}"
        for place in before
        for key in before[place].keys() | after[place].keys()
        if before[place].get(key, before) is not after[place].get(key, before)
    ]


def wrapped() -> set[str]:
    seams = precision_shim.status().frameworks["verl"].seams
    return {seam.target for seam in seams if seam.state == "wrapped"}


def test_uninstall_leaves_every_namespace_as_it_was(cpu: None) -> None:
    finders = list(sys.meta_path)
    before = namespaces()
    for _ in range(2):
        precision_shim.install()
        precision_shim.install()
        assert len(wrapped()) >= 8
        assert len(changes(before)) >= 8
        precision_shim.uninstall()
        assert not changes(before)
        assert sys.meta_path == finders


@pytest.mark.skipif(Version("0.7") > VERL, reason="rollout-agreement supports verl from 0.7 on")
def test_a_late_install_reaches_the_copy_that_verls_package_has() -> None:
    """``verl.utils`` has ``validate_config`` by value, and drivers import it from there."""
    utils = pytest.importorskip("verl.utils.config", reason="this version has no such module")
    package = sys.modules["verl.utils"]
    before = getattr(package, "validate_config", None)
    if before is None or before is not getattr(utils, "validate_config", None):
        pytest.skip("this version's package has no copy")
    precision_shim.install(features="rollout-agreement")
    try:
        assert package.validate_config is utils.validate_config is not before
    finally:
        precision_shim.uninstall()
    assert package.validate_config is utils.validate_config is before
