"""The table of wishes on verl's own config objects: one plan for each, as in every framework."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from precision_shim_adapters.megatron.acting import build as builds
from precision_shim_adapters.verl import megatron
from precision_shim_adapters.verl.megatron import of_engine

from ..wishes import Case, each_case, expected, outcome_in
from .conftest import VERL
from .support import engine, optim_config

pytestmark = pytest.mark.skipif(
    Version("0.7") > VERL, reason="verl 0.6 is refused on this path: no plan of ours is in force"
)


@each_case
def test_the_table(fused_adam: str, shim: Any, checkpoint: Path, case: Case) -> None:
    shim(settings=case.settings)
    asked = dict(case.asked)
    optimizer = {"optimizer": asked.pop("optimizer")} if "optimizer" in asked else {}
    made = engine(
        checkpoint,
        str(case.dtype).removeprefix("torch."),
        optim=optim_config(override_optimizer_config=asked, **optimizer),
        ddp={} if case.bucket is None else {"grad_reduce_in_fp32": case.bucket},
    )
    made.param_dtype = case.dtype  # as verl's initialize does, before it builds anything
    assert outcome_in("verl", case, of_engine(made)) == expected(case)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("states", ["auto", "follow-model"])
def test_wishes_are_read_once_and_planned_once(
    fused_adam: str,
    shim: Any,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    states: str,
) -> None:
    """From the DDP over the OptimizerConfig and the check to the scaler and the audit."""
    shim(settings={"optimizer_states": states})
    calls: list[str] = []

    def counted(module: Any, name: str) -> None:
        own = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return own(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    counted(megatron, "of_engine")
    counted(builds, "plan_wishes")
    optim = optim_config(override_optimizer_config={"adam_beta2": 0.95})
    made = engine(checkpoint, dtype, optim=optim)
    made.initialize()
    assert Counter(calls) == {"of_engine": 1, "plan_wishes": 1}
