"""The checkpoint doctor's verdict equals the result of a real load, for all writers and resumes.

verl's own functions load. Each writer's checkpoint is written once for all resumes.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from precision_shim.adapting import version_of
from precision_shim.errors import CheckpointLayoutError
from precision_shim_adapters.megatron.policy.groups import identifiers
from precision_shim_adapters.megatron.policy.legality import release

from ..audit.offloading import OFFLOAD, same_stepped, stepped
from ..every_framework.checkpoint_doctor import ask, told_by
from ..stand_ins.fake_gpu import FakeGpu
from .conftest import VERL
from .test_checkpoints import SHARDINGS, STEPS, job, same, shim

pytestmark = [
    pytest.mark.skipif(
        Version("0.7") > VERL, reason="verl 0.6's environment is for the untested version"
    ),
    pytest.mark.slow,
]

CORE = release(version_of("megatron-core", ("megatron",)) or "")

OWN = {"use_precision_aware_optimizer": True}
WHOLE = {**OWN, "store_param_remainders": False}
BF16 = {**OWN, "exp_avg_dtype": "bf16"}

WRITERS: dict[str, tuple[bool | None, str, dict[str, Any]]] = {
    "off": (False, "", {}),
    "on": (True, "follow-model", {}),
    "own, off": (False, "", OWN),
    "own, on": (True, "as-configured", OWN),
    "own whole masters, off": (False, "", WHOLE),
    "the shim's, saved without it": (None, "follow-model", {}),
}
"""For each writer: whether the shim is on, the shim's policy, and the user's own config."""

DP, FULLY, ZERO = SHARDINGS
SAVED = (
    *(("off", DP), ("off", FULLY), ("on", ZERO), ("own, off", DP), ("own, off", FULLY)),
    *(("own, off", ZERO), ("own, on", DP), ("own, on", FULLY), ("own whole masters, off", FULLY)),
    *(("the shim's, saved without it", DP), ("the shim's, saved without it", ZERO)),
)
"""Writers and sharding types of different files: numbers in place of remainders, the names of
buckets in keys, dtypes beside the states."""

RESUMES: dict[str, tuple[bool, str, dict[str, Any]]] = {
    "off": (False, "", {}),
    "own, off": (False, "", OWN),
    "own whole masters, off": (False, "", WHOLE),
    "on": (True, "follow-model", {}),
    "on, another beta2": (True, "auto", {"adam_beta2": 0.999}),
    "on, as configured": (True, "as-configured", {}),
    "own, on": (True, "as-configured", OWN),
    "own bf16 moment, on": (True, "as-configured", BF16),
}


def outcome(folder: Path, sharding: str, saved: Any, config: dict[str, Any], offloads: bool) -> str:
    """Load for real; returns ``exact``, ``other weights``, or an error's name.

    With CPU offload, ``exact`` also requires that two later steps are counted.
    """
    try:
        resumed = job(seed=1, **config)
        resumed.load(folder, sharding)
        if not offloads:
            return "exact" if same(saved, resumed.states()) else "other weights"
        exact = same_stepped(stepped(resumed.optimizer), saved)
        resumed.train(2, first=STEPS)
    except (Exception, CheckpointException) as error:  # Megatron raises several kinds
        return type(error).__name__
    counts = {count for count, *_ in stepped(resumed.optimizer)}
    return "exact" if exact and counts == {STEPS + 2} else "other weights"


def hold(folder: Path, sharding: str, saved: Any, *, offloads: bool) -> None:
    """For each resume, the doctor's verdict is what the load does."""
    told, done = {}, {}
    for resume, (on, policy, config) in (OFFLOAD_RESUMES if offloads else RESUMES).items():
        with shim(on, policy or "auto"):
            # The DDP in these tests has the default bucket of verl.
            known = {"adam_beta2": 0.95, "grad_reduce_in_fp32": True, **config}
            told[resume] = ask(folder, "verl", known).outcome.verdict
            done[resume] = told_by(outcome(folder, sharding, saved, config, offloads))
    assert told == done


@pytest.mark.parametrize(("writer", "sharding"), SAVED)
def test_the_verdict_is_what_the_load_does(
    fused_adam: str, tmp_path: Path, writer: str, sharding: str
) -> None:
    on, policy, own = WRITERS[writer]
    with shim(on is not False, policy or "auto"):
        first = job(**own)
        if on:
            first.train(STEPS)
            first.save(tmp_path / "saved", sharding)
    if not on:
        first.train(STEPS)
        first.save(tmp_path / "saved", sharding)
    hold(tmp_path / "saved", sharding, first.states(), offloads=False)


def groups_of(one: Any) -> list[dict[str, Any]]:
    """The settings of each parameter group that a load changes, and no step does."""
    return [
        {name: group[name] for name in ("max_lr", "min_lr", "eps", "wd_mult")}
        for optimizer in one.optimizer.chained_optimizers
        for group in optimizer.optimizer.param_groups
    ]


@pytest.mark.parametrize("sharding", [DP, FULLY])
@pytest.mark.parametrize("own", [{}, {"decoupled_lr": 1e-4}, {"eps": 1e-4}], ids=str)
def test_the_verdict_on_parameter_groups(
    fused_adam: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sharding: str,
    own: dict[str, float],
) -> None:
    """Megatron finds a group by a few settings, and gives it those of the last group that fits."""
    from megatron.core import optimizer

    if "eps" in own:
        standard = optimizer.get_standard_config_overrides
        key = optimizer.ParamKey(name="*linear_qkv.weight")
        monkeypatch.setattr(
            optimizer,
            "get_standard_config_overrides",
            lambda config: {**standard(config), key: own},
        )
    config = {name: value for name, value in own.items() if name != "eps"}
    first = job(**config)
    first.train(1)
    first.save(tmp_path / "saved", sharding)
    known = {"adam_beta2": 0.95, "grad_reduce_in_fp32": True, "min_lr": 0.0, **config}
    told, done = {}, {}
    for on, lr in ((False, 1e-2), (True, 1e-2), (False, 2e-2), (True, 2e-2)):
        with shim(on, "as-configured"):
            told[on, lr] = ask(tmp_path / "saved", "verl", {**known, "lr": lr}).outcome.verdict
            try:
                second = job(seed=1, lr=lr, **config)
                second.load(tmp_path / "saved", sharding)
                same_groups = groups_of(second) == groups_of(first)
                done[on, lr] = "exact" if same_groups else "misread"
            except (KeyError, CheckpointLayoutError) as error:
                done[on, lr] = told_by(type(error).__name__)
    assert told == done
    assert done[True, 1e-2] == "exact"
    assert "lr=0.01" in ask(tmp_path / "saved", "verl", on=True).outcome.because


def test_the_settings_by_which_megatron_finds_a_group(cpu: None) -> None:
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    assert identifiers(CORE) == param_group_identifier_keys


@pytest.mark.skipif(CORE >= (0, 19), reason="0.19 reads both forms")
def test_the_common_state_within(fused_adam: str, tmp_path: Path) -> None:
    """megatron-core 0.19 writes the common state as an object, where older ones do not look."""
    first, common = job(), tmp_path / "common.pt"
    first.train(1)
    first.save(tmp_path, DP)
    assert ask(tmp_path, "verl", on=False).outcome.exact
    metadata, content = pickle.loads((tmp_path / ".metadata").read_bytes()), io.BytesIO()
    torch.save([torch.load(common, weights_only=False)], content)
    (tmp_path / "__9_0.distcp").write_bytes(content.getvalue())
    place = MetadataIndex("common_state/shard_0_1")
    metadata.state_dict_metadata[place.fqn] = BytesStorageMetadata()
    metadata.storage_data[place] = _StorageInfo("__9_0.distcp", 0, len(content.getvalue()))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    common.unlink()
    found = ask(tmp_path, "verl", on=False)
    assert (found.outcome.verdict, found.remedy) == ("fails", "megatron-core 0.19 or newer")
    with pytest.raises(Exception, match=r"common\.pt|not a distributed checkpoint"):
        job(seed=1).load(tmp_path, DP)


def offloaded(share: float, **config: Any) -> dict[str, Any]:
    return {**OFFLOAD, "optimizer_offload_fraction": share, **config}


OFFLOAD_WRITERS = {
    "all, off": (False, offloaded(1.0, **OWN)),
    "half, on": (True, offloaded(0.5, **OWN)),
    "none, off": (False, offloaded(0.0, **OWN)),
    "none, on": (True, offloaded(0.0, **OWN)),
    "not precision-aware, off": (False, offloaded(1.0)),
    "not offloaded, off": (False, WHOLE),
}
"""For each writer: whether the shim is on, and the user's own config."""

OFFLOAD_SAVED = (
    *(("all, off", ZERO), ("half, on", DP), ("half, on", FULLY), ("none, off", DP)),
    *(("none, off", FULLY), ("none, on", ZERO), ("not precision-aware, off", DP)),
    *(("not precision-aware, off", FULLY), ("not offloaded, off", FULLY)),
)

OFFLOAD_RESUMES = {
    f"{name}, {'on' if on else 'off'}": (on, "as-configured", config)
    for name, config in {
        "all": offloaded(1.0, **OWN),
        "half": offloaded(0.5, **OWN),
        "none": offloaded(0.0, **OWN),
        "not precision-aware": offloaded(1.0),
        "not offloaded": {},
    }.items()
    for on in (False, True)
}


@pytest.mark.parametrize(("writer", "sharding"), OFFLOAD_SAVED)
def test_the_verdict_of_an_offloaded_optimizer(
    fused_adam: str, tmp_path: Path, writer: str, sharding: str
) -> None:
    on, own = OFFLOAD_WRITERS[writer]
    with FakeGpu():
        with shim(on, "as-configured"):
            first = job(**own)
            first.train(STEPS)
            first.save(tmp_path / "saved", sharding)
        hold(tmp_path / "saved", sharding, stepped(first.optimizer), offloads=True)


def test_an_offloaded_optimizer_that_only_the_file_tells_of(
    fused_adam: str, tmp_path: Path
) -> None:
    with FakeGpu():
        first = job(**offloaded(0.5, **OWN))
        first.train(STEPS)
        first.save(tmp_path / "saved", "dp_reshardable")
    assert ask(tmp_path / "saved", "verl", on=False).outcome.verdict == "misread"
    assert ask(tmp_path / "saved", "verl", on=True).outcome.verdict == "exact"
