"""States that Megatron alone would lose: of fp32 parameters, copied configs, and torch's Adam.

Megatron's own classes make models and optimizers. verl's adapter adds the shim's seams, because
verl is installed; "off" is the unpatched Megatron.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from precision_shim import PrecisionShimWarning
from precision_shim.errors import CheckpointLayoutError

from ..processes.rank_server import Ranks
from ..testing import tiny_training as tiny
from .conftest import VERL
from .states_support import AWARE, KINDS, build, everything
from .test_checkpoints import SHARDINGS, job, same, shim

pytestmark = [
    pytest.mark.skipif(
        Version("0.7") > VERL, reason="verl 0.6's environment is for the untested version"
    ),
    pytest.mark.slow,
]

CORE = Version(version("megatron-core")) if Version("0") < VERL else Version("0")


BF16 = dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), torch.bfloat16)
FP32_PARAMETERS = [
    *((sharding, "fp32", AWARE) for sharding in SHARDINGS),
    *((sharding, "fp32 norms", AWARE) for sharding in SHARDINGS),
    ("dp_reshardable", "fp32 head", AWARE),
    ("fully_reshardable", "fp32 norms", {}),
    ("dp_reshardable", "fp32 norms", AWARE | {"store_param_remainders": False}),
    ("dp_zero_gather_scatter", "fp32", AWARE | BF16),
]
"""Models with only fp32 parameters, and bf16 models in which some parameters are fp32."""


@pytest.mark.parametrize(("sharding", "kind", "fields"), FP32_PARAMETERS)
def test_fp32_parameters_go_on(
    fused_adam: str, tmp_path: Path, sharding: str, kind: str, fields: dict[str, Any]
) -> None:
    """Save, load into another model, and compare all states, also after further steps."""
    with shim(on=True, policy="as-configured"):
        first = build(kind, **fields)
        tiny.train(*first, steps=5)
        tiny.save(*first, tmp_path / "saved", sharding)
        saved = everything(*first)
        second = build(kind, seed=1, **fields)
        assert not all(map(torch.equal, saved, everything(*second)))
        tiny.load(*second, tmp_path / "saved")
        assert all(map(torch.equal, saved, everything(*second)))
        straight = tiny.train(*first, steps=3, first=5)
        assert tiny.train(*second, steps=3, first=5) == straight
        assert all(map(torch.equal, everything(*first), everything(*second)))


@pytest.mark.parametrize(
    ("sharding", "fields"), [("dp_reshardable", AWARE), ("fully_reshardable", {})]
)
def test_masters_that_fused_adam_never_updated(
    fused_adam: str, tmp_path: Path, sharding: str, fields: dict[str, Any]
) -> None:
    """Masters saved without the shim are the first weights: the parameters stay, the shim warns."""
    first = build("fp32", **AWARE)
    tiny.train(*first, steps=5)
    tiny.save(*first, tmp_path / "saved", sharding)
    straight = tiny.train(*first, steps=3, first=5)
    with shim(on=True, policy="as-configured"):
        second = build("fp32", seed=1, **fields)
        with pytest.warns(PrecisionShimWarning, match="masters of fp32 parameters are not"):
            tiny.load(*second, tmp_path / "saved")
        assert tiny.train(*second, steps=3, first=5) == straight


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_an_unpatched_megatron_reads_fp32_parameters(
    fused_adam: str, tmp_path: Path, sharding: str
) -> None:
    with shim(on=True, policy="as-configured"):
        first = build("fp32", **AWARE)
        tiny.train(*first, steps=5)
        tiny.save(*first, tmp_path / "saved", sharding)
        straight = tiny.train(*first, steps=3, first=5)
    second = build("fp32", seed=1, **AWARE)
    if sharding == "dp_reshardable" and Version("0.17") > CORE:  # a fault in Megatron's padding
        with pytest.raises(AttributeError, match="bool"):
            tiny.load(*second, tmp_path / "saved")
        return
    tiny.load(*second, tmp_path / "saved")
    assert tiny.train(*second, steps=3, first=5) == straight


def test_states_that_the_job_keeps_in_fp16(fused_adam: str, tmp_path: Path) -> None:
    """fp32 states are rounded, with warnings; those that were rounded before are not."""
    rounded, anew = "fp32 masters were rounded", "exp_avg is kept in fp16 with a scale"

    def told(made: tuple[list[Any], Any], folder: Path) -> set[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tiny.load(*made, folder)
        return {part for one in caught for part in (rounded, anew) if part in str(one.message)}

    whole = AWARE | {"store_param_remainders": False}
    half = whole | {"main_params_dtype": torch.float16, "exp_avg_dtype": torch.float16}
    with shim(on=True, policy="as-configured"):
        first, second = build("bf16", **whole), build("bf16", seed=1, **half)
        tiny.train(*first, steps=2)
        tiny.save(*first, tmp_path / "fp32", "dp_reshardable")
        assert told(second, tmp_path / "fp32") == {rounded, anew}
        tiny.save(*second, tmp_path / "fp16", "dp_reshardable")
        assert told(build("bf16", seed=2, **half), tmp_path / "fp16") == set()


def test_on_two_ranks(megatron_ranks: Ranks) -> None:
    """Each rank owns parts of the parameters, in every sharding type."""
    assert megatron_ranks("fp32_parameters", world=2) == [sorted(KINDS)] * 2


# -- stages of a pipeline ------------------------------------------------------------------------


def test_tied_embeddings_beside_fp32_parameters(megatron_ranks: Ranks) -> None:
    """Both stages' buckets have one dtype, or the stages could not add their copies' gradients."""
    first, last = megatron_ranks("tied_embeddings")
    for case, (buckets, aware, gradient, embedding) in first.items():
        low = "torch.bfloat16" if case.endswith("True") else "torch.float32"
        assert (buckets, gradient, aware) == ([low], 2.0, case.endswith("True")), case
        assert [buckets, aware, gradient, embedding] == last[case], case
    alone, mixed, _ = (case[3] for case in first.values())
    assert alone == mixed


# -- a copied config ---------------------------------------------------------------------------


def from_fields(config: Any) -> Any:
    fields = [field.name for field in dataclasses.fields(config)]
    return type(config)(**{name: getattr(config, name) for name in fields})


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda one: pickle.loads(pickle.dumps(one)),
    "fields": from_fields,
    "replace, copy, replace": lambda one: dataclasses.replace(
        copy.copy(dataclasses.replace(one, lr=2e-2)), min_lr=1e-3
    ),
}


@pytest.mark.parametrize("by", COPIES)
def test_a_copied_config(fused_adam: str, tmp_path: Path, by: str) -> None:
    """dp_reshardable, shim on at the save and off at the load: masters are saved whole."""
    from precision_shim_adapters.megatron.checkpoints.optimizer_state import is_added_by_shim

    with shim(on=True):
        first = job(through=COPIES[by])
        assert first.optimizer.config.use_precision_aware_optimizer
        first.train(3)
        first.save(tmp_path / "saved", "dp_reshardable")
        saved = first.states()
    second = job(seed=1)
    assert not second.optimizer.config.use_precision_aware_optimizer
    second.load(tmp_path / "saved", "dp_reshardable")
    assert same(saved, second.states())
    with shim(on=True, policy="as-configured"):  # what the user's own config asks for is not ours
        theirs = job(use_precision_aware_optimizer=True, through=COPIES[by]).optimizer.config
        assert theirs.use_precision_aware_optimizer
        assert not is_added_by_shim(theirs)


# -- torch's Adam ------------------------------------------------------------------------------


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_states_of_torchs_adam(cpu: None, tmp_path: Path, sharding: str) -> None:
    """Without TransformerEngine the save warns, or raises under strict, and the load raises."""
    first = build("bf16")
    tiny.train(*first, steps=2)
    tiny.save(*first, tmp_path / "off", sharding)
    with pytest.raises(AssertionError):  # Megatron's own, without a message
        tiny.load(*build("bf16", seed=1), tmp_path / "off")
    told = rf"megatron-core {CORE}.*{sharding}.*TransformerEngine"
    with shim(on=True):
        with pytest.warns(PrecisionShimWarning, match=told):
            tiny.save(*first, tmp_path / "on", sharding)
        with pytest.raises(CheckpointLayoutError, match=told):
            tiny.load(*build("bf16", seed=1), tmp_path / "on")
        warm = build("bf16", seed=1)
        tiny.train(*warm, steps=1)
        with pytest.raises(CheckpointLayoutError, match=told):
            tiny.load(*warm, tmp_path / "on")
    with shim(on=True, strict=True), pytest.raises(CheckpointLayoutError, match=told):
        tiny.save(*first, tmp_path / "strict", sharding)
