"""In older verl versions the shim refuses fp16 on engines without a loss scaler, by name.

In newer versions the shim scales these engines: see test_engines.py. The environments here lack the
engines' packages, so empty packages replace these. Engine classes and configs are verl's own.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from packaging.version import Version

import precision_shim
from precision_shim.errors import UnsupportedPrecisionError

from ..stand_ins.empty_packages import empty_packages
from .conftest import VERL

ENGINES = {
    "veomni": ("veomni.transformer_impl:VeOmniEngine", "VeOmniEngineConfig", "0.8"),
    "torchtitan": ("torchtitan.transformer_impl:TorchTitanEngine", "TorchtitanEngineConfig", "0.9"),
}
UNSCALED = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            not Version("0.7") <= VERL < Version(scaled), reason=f"scaled from {scaled}"
        ),
    )
    for name, (*_, scaled) in ENGINES.items()
]


def start(name: str, fp16: bool) -> str:
    """Start a real engine class with a real config; returns the failure due to an empty package.

    Only this engine's package is replaced, because the shim cannot scale engines on empty packages.
    """
    place, config_name, _ = ENGINES[name]
    module, _, kind = place.partition(":")
    configs = importlib.import_module("verl.workers.config")
    config = getattr(configs, config_name)(**({"dtype": "float16"} if fp16 else {}))
    with empty_packages(name):
        engine = getattr(importlib.import_module(f"verl.workers.engine.{module}"), kind)
        try:
            engine(None, config, None, None)
        except UnsupportedPrecisionError:
            raise
        except Exception as error:  # the empty package lacks all that the engine builds
            return repr(error)
    raise AssertionError("an engine was built on an empty package")


@pytest.mark.parametrize("name", UNSCALED)
def test_told_by_name_and_refused_in_strict_mode(name: str, shim: Any) -> None:
    told = f"(?i){name} engine makes no"
    shim(features=["fp16-scaling"], frameworks=["verl"])
    with pytest.warns(precision_shim.PrecisionShimWarning, match=told):
        start(name, True)
    assert any(one.chosen == "left as it is" for one in precision_shim.status().decisions)
    precision_shim.uninstall()
    shim(features=["fp16-scaling"], frameworks=["verl"], strict=True)
    with pytest.raises(UnsupportedPrecisionError, match=told):
        start(name, True)


@pytest.mark.parametrize("name", UNSCALED)
def test_silent_where_no_float16_is_asked(name: str, shim: Any) -> None:
    alone = start(name, False)
    shim(features=["fp16-scaling"], frameworks=["verl"])
    assert start(name, False) == alone
    assert precision_shim.status().decisions == ()
