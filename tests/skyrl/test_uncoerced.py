"""Dtype names in a SkyRL job without ``dtype-coercion``: the plan and the worker agree."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from precision_shim_adapters.skyrl.training import megatron

from ..plan.verdicts import Drawn, by_worker, hold
from .test_plan_and_worker import _KWARGS, on_megatron, plan_of

pytestmark = pytest.mark.slow

_AWARE = {f"{_KWARGS}.use_precision_aware_optimizer": "true"}


_OFF = {"features": "-dtype-coercion"}


@pytest.mark.parametrize(
    ("written", "out"),
    [
        ({**_AWARE, f"{_KWARGS}.exp_avg_dtype": "bf16"}, _OFF),
        ({**_AWARE, f"{_KWARGS}.exp_avg_sq_dtype": " FP32"}, _OFF),
        ({**_AWARE, f"{_KWARGS}.main_grads_dtype": "torch.bfloat16"}, {"frameworks": "verl"}),
        ({f"{_KWARGS}.exp_avg_dtype": "torch.float32"}, _OFF),
    ],
    ids=str,
)
def test_names_where_they_are_not_coerced(
    fused_adam: str,
    checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    written: dict[str, str],
    out: dict[str, str],
) -> None:
    drawn = Drawn(written)
    # SkyRL 0.2 hands names on as they are, and FusedAdam's error names its own argument.
    named = r"FusedAdam.* must be one of torch"
    model = checkpoints["bfloat16"]
    worker = by_worker(lambda: on_megatron(drawn, model), drawn, named=named, **out)
    for name, value in out.items():
        monkeypatch.setenv(f"PRECISION_SHIM_{name.upper()}", value)
    hold([drawn], plan_of("megatron", "--transformer-engine", fused_adam), [worker])


def test_the_names_that_skyrl_itself_takes() -> None:
    try:
        theirs = importlib.import_module(f"{megatron.TRAIN}.distributed.megatron.optimizer_dtype")
    except ImportError:  # before SkyRL 0.3
        assert not megatron.coerces_itself()
    else:
        assert megatron.coerces_itself()
        assert set(theirs._DTYPE_NAME_TO_TORCH) == set(megatron._OWN_NAMES)
        assert megatron.takes_name(" BF16")
        assert not megatron.takes_name("torch.bfloat16")
