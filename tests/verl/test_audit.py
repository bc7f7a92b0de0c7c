"""The audit in verl's Megatron engine: alone, with the other features, and under strict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

import precision_shim
from precision_shim.errors import InconsistentPrecisionError

from ..every_framework.shim_warnings import ours
from ..every_framework.without_effect import Case, cases, hold
from .conftest import VERL
from .support import engine, optim_config

pytestmark = pytest.mark.skipif(
    Version("0.7") > VERL, reason="verl 0.6's environment is for the untested version"
)


def build(checkpoint: Path, **config: Any) -> Any:
    made = engine(checkpoint, "bfloat16", **config)
    made.initialize()
    return made


@pytest.mark.slow
def test_alone_it_knows_whose_optimizer_it_is(fused_adam: str, checkpoint: Path, shim: Any) -> None:
    plain = build(checkpoint)
    shim(features=["audit"])
    made = build(checkpoint)
    (audit,) = precision_shim.status().audit
    assert (audit.framework, audit.subject, audit.ok) == ("verl", "actor", True)
    # The audit changes no setting of the optimizer.
    (mine, theirs) = (one.optimizer.chained_optimizers[0].config for one in (made, plain))
    assert mine == theirs
    assert not precision_shim.status().decisions


@pytest.mark.parametrize(("features", "strict"), [(["audit"], False), (None, True)])
def test_a_bucket_that_the_user_wrote(
    fused_adam: str, checkpoint: Path, shim: Any, features: Any, strict: bool
) -> None:
    """One fault gives one warning, even under strict, because the user wrote the setting."""
    shim(features=features, strict=strict, settings={"optimizer_states": "as-configured"})
    with ours() as said:
        build(checkpoint, ddp={"grad_reduce_in_fp32": False})
    (audit,) = precision_shim.status().audit
    assert [one.code for one in audit.problems] == ["main-grads-dtype"]
    assert ["main" in one for one in said].count(True) == 1, said


def test_flags_that_the_user_wrote(fused_adam: str, checkpoint: Path, shim: Any) -> None:
    fields = optim_config(override_optimizer_config={"bf16": False, "fp16": True})
    shim(features=["audit"], strict=True)
    with ours() as said:
        build(checkpoint, optim=fields)
    assert ["params-dtype" in one for one in said].count(True) == 1
    assert "params-dtype" in [one.code for one in precision_shim.status().audit[0].problems]


def test_what_nobody_wrote_raises_under_strict(
    fused_adam: str, checkpoint: Path, shim: Any
) -> None:
    from megatron.core.distributed import DistributedDataParallel

    own = DistributedDataParallel.__init__

    def another_bucket(self: Any, config: Any, ddp_config: Any, *args: Any, **kwargs: Any) -> None:
        ddp_config.grad_reduce_in_fp32 = False
        own(self, config, ddp_config, *args, **kwargs)

    shim(features=["audit"], strict=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistributedDataParallel, "__init__", another_bucket)
        with pytest.raises(InconsistentPrecisionError, match="expected fp32, found bf16"):
            build(checkpoint)


def test_a_config_that_cannot_be_read_ends_no_build(
    fused_adam: str, checkpoint: Path, shim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from precision_shim_adapters.megatron.training.build import Build

    def unreadable(_: Any) -> Any:
        raise KeyError("optimizer")

    shim(features=["audit"])
    monkeypatch.setattr(Build, "requested", property(unreadable))
    kept = build(checkpoint)  # a dropped optimizer's audit goes with it
    assert [(one.framework, one.subject) for one in precision_shim.status().audit] == [("verl", "")]
    assert kept


@cases("verl", "megatron")
def test_keys_without_effect(fused_adam: str, checkpoint: Path, case: Case) -> None:
    if case.told[0].startswith("optim.") and Version("0.9") > VERL:
        pytest.skip("before 0.9 the shim itself reads these fields")
    written = dict(case.written)
    dtype, optim = written.pop("dtype", "bfloat16"), written.pop("optim")

    def made() -> Any:
        one = engine(checkpoint, dtype, optim=optim_config(**optim), **written)
        one.initialize()
        return one

    hold(case, made)
