"""The shim reads the weights' dtypes from the engines of NeMo-RL's own generation workers.

The engine is a stand-in, because vLLM is not installed; ``tests/vllm/test_nemo_rl.py`` runs vLLM.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from precision_shim.auditing import halves
from precision_shim_adapters.ray_actors import plain_class

from .. import ray_cluster
from ..rank_server import Ranks
from .cpu import nemo_rl_on_cpu
from .generation_driver import CONFIG, KINDS, METHODS, give

HERE = Path(__file__).parent
OWN = ["report_device_id", *METHODS[1:]]
"""The engine methods that NeMo-RL itself calls, except ``bind_numa`` (from 0.7 on)."""

BOTH = [part for own in OWN for part in (own, "apply_model")]


@pytest.fixture(scope="module", autouse=True)
def imported() -> Iterator[None]:
    with nemo_rl_on_cpu():
        for name in KINDS.values():
            importlib.import_module(name.rpartition(".")[0])
        yield


def call(worker: Any, method: str) -> Any:
    result = getattr(worker, method)()
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def without_numa(asked: list[str]) -> list[str]:
    return [one for one in asked if one != "bind_numa"]


def held(folder: Path) -> dict[str, Any]:
    return {one.name: one for _, one in halves.read(str(folder)) if isinstance(one, halves.Held)}


def make(suffix: str) -> Any:
    """A worker object without an actor, made like the second worker of an engine."""
    module, _, name = KINDS[suffix].rpartition(".")
    plain = plain_class(getattr(importlib.import_module(module), name))
    worker = plain(copy.deepcopy(CONFIG))
    give(worker, suffix)
    return worker


@pytest.mark.parametrize("suffix", KINDS)
def test_an_engine_is_asked_when_it_is_made_and_after_weight_syncs(
    shim: Any, tmp_path: Path, suffix: str
) -> None:
    shim(settings={"audit_dir": str(tmp_path)})
    worker = make(suffix)
    syncs = []
    for method in METHODS:
        call(worker, f"{method}{suffix}")
        syncs.append(held(tmp_path)["worker"].sync)
    assert syncs == [0, 1, 2]
    assert without_numa(worker.llm.asked) == BOTH
    one = held(tmp_path)["worker"]
    assert (one.framework, one.subject, one.computes) == ("nemo-rl", "rollout", "fp16")
    assert one.kinds == {"other": {"fp16": 64 * 64 + 64}}
    assert one.not_answered == ""


@pytest.mark.parametrize("suffix", KINDS)
def test_a_sync_that_failed_is_none(shim: Any, tmp_path: Path, suffix: str) -> None:
    """If a weight sync fails, NeMo-RL's method returns ``False``."""
    shim(settings={"audit_dir": str(tmp_path)})
    worker = make(suffix)
    worker.cfg["vllm_cfg"]["async_engine"] = not suffix  # NeMo-RL's method refuses this
    assert call(worker, f"{METHODS[1]}{suffix}") is False
    assert worker.llm.asked == []
    assert held(tmp_path) == {}


@pytest.mark.parametrize("suffix", KINDS)
@pytest.mark.parametrize("features", ["", "-audit"])
def test_without_the_folder_or_the_feature_nothing_is_asked(
    shim: Any, tmp_path: Path, suffix: str, features: str
) -> None:
    shim(features=features, settings={"audit_dir": str(tmp_path)} if features else {})
    worker = make(suffix)
    for method in METHODS:
        call(worker, f"{method}{suffix}")
    assert without_numa(worker.llm.asked) == OWN
    assert held(tmp_path) == {}


@pytest.mark.slow
@pytest.mark.oldest
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("start_up_file")
def test_an_actor_of_nemo_rls_own_builder_asks_its_engine(ranks: Ranks, tmp_path: Path) -> None:
    found = ray_cluster.drive(
        ranks,
        HERE / "generation_driver.py",
        paths=(HERE / "site",),
        timeout=850,
        PRECISION_SHIM="1",
        PRECISION_SHIM_AUDIT_DIR=str(tmp_path),
    )
    assert found["done"][1:] == [True, True]
    assert without_numa(found["asked"]) == BOTH
    (one,) = held(tmp_path).values()
    assert one.name == "vllm_policy-0-0"
    assert (one.computes, one.sync, one.not_answered) == ("fp16", 2, "")
