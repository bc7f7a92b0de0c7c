"""Under strict the audit of a Megatron worker only warns, because the user wrote all keys."""

from __future__ import annotations

from typing import Any

import pytest

import precision_shim

from ...every_framework.shim_warnings import ours
from ...every_framework.without_effect import Case, cases, hold


@pytest.mark.parametrize(
    ("precision", "config", "codes"),
    [
        ("bfloat16", {}, []),
        # 15 of NeMo-RL's YAML files set grad_reduce_in_fp32: false.
        ("bfloat16", {"ddp": {"grad_reduce_in_fp32": False}}, ["main-grads-dtype"]),
        # The YAML's "bf16: true" contradicts a policy in fp16.
        ("float16", {}, ["params-dtype", "scaler-missing"]),
    ],
    ids=["honest", "bucket", "flags"],
)
def test_what_the_config_wrote_warns_once_and_raises_nowhere(
    worker: Any, shim: Any, precision: str, config: dict[str, Any], codes: list[str]
) -> None:
    shim(features=["audit"], strict=True)
    with ours() as said, worker(precision, **config):
        (audit,) = precision_shim.status().audit
    assert (audit.framework, audit.subject) == ("nemo-rl", "policy")
    assert [one.code for one in audit.problems] == codes
    for code in codes:
        assert sum(code in one for one in said) == 1, said
    assert len(said) == len(codes)
    assert not precision_shim.status().decisions


@cases("nemo-rl", "megatron")
def test_keys_without_effect(worker: Any, shim: Any, case: Case) -> None:
    def build() -> Any:
        with worker("bfloat16", **case.written) as one:
            return one

    hold(case, build)
