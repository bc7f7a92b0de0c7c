"""The shim keeps signatures and docs of the actor classes of NeMo-RL's Megatron workers."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from packaging.version import Version

from precision_shim_adapters.nemo_rl.megatron import ReportingWorker

from ...actor_methods import described
from ..support import NEMO_RL
from .support import POLICY, VALUE, plain


@pytest.mark.parametrize("target", (POLICY, VALUE) if Version("0.7") <= NEMO_RL else (POLICY,))
def test_its_methods_look_like_the_frameworks(cpu: None, shim: Any, target: str) -> None:
    module, _, name = target.partition(":")

    def methods() -> dict[str, Any]:
        return described(getattr(importlib.import_module(module), name))

    before = methods()
    assert ReportingWorker not in plain(target).__mro__
    shim()
    after = methods()
    assert ReportingWorker in plain(target).__mro__
    for method in ("__init__", "train", "save_checkpoint", "load_checkpoint"):
        assert method in before
    assert {method: after[method] for method in before} == before
