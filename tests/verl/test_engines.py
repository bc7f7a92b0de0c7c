"""verl's VeOmni, Automodel, torchtitan and FSDP Turbo engines in fp16, over gloo.

``engine_ranks.py`` has the ranks' cases. FSDP Turbo itself is a stand-in. With expert parallelism
each rank has half of the experts, and each token goes to the rank that has its experts. VeOmni's
experts need a GPU's kernels then, and are not run here.
"""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from ..processes.rank_server import Ranks
from ..processes.ray_cluster import drive
from .conftest import VERL
from .ray_verdict import trained_skipped_and_resumed

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("veomni", "nemo_automodel")),
    reason="the packages of these engines are in an environment of their own",
)

SINCE = {"veomni": "0.8.0", "automodel": "0.8.0", "torchtitan": "0.9.0", "fsdp_turbo": "0.9.1"}
ENGINES = [name for name, version in SINCE.items() if Version(version) <= VERL]
SHOWN = {
    "veomni": "VeOmniEngine",
    "automodel": "AutomodelEngine",
    "torchtitan": "TorchTitanEngine",
    "fsdp_turbo": "FSDPTurboEngine",
}
"""The first part of the engines' class names."""
needs_turbo = pytest.mark.skipif("fsdp_turbo" not in ENGINES, reason="verl has it from 0.9.1")
needs_titan = pytest.mark.skipif(
    "torchtitan" not in ENGINES, reason="no torchtitan is released that this verl's engine takes"
)
PARALLEL = {"automodel": {"ep_size": 2}, "torchtitan": {"expert_parallel_size": 2}}
"""The fields of expert parallelism."""


@pytest.fixture(scope="module")
def of_experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A mixture of four experts in each layer."""
    from .engine_support import make_model

    return str(make_model(tmp_path_factory.mktemp("qwen3-moe"), experts=True))


# -- training ----------------------------------------------------------------------------------


def same(one: dict[str, Any], hand: dict[str, Any]) -> None:
    """Eight steps with the shim equal eight steps by hand, bit for bit."""
    for key in ("parameters", "moments", "counts"):
        assert one["state"][key] == hand["state"][key], key
    assert json.dumps(one["said"]) == json.dumps(hand["said"])  # as text, because NaN != NaN
    assert [step for step, said in enumerate(one["said"]) if math.isnan(said[-1])] == [2, 5]
    assert one["state"]["counter"] == [8, 2, 0]
    assert (one["state"]["scale"], one["state"]["tracker"]) == (hand["scale"], hand["tracker"])
    assert one["metrics"]["skipped_steps"] == 2.0
    assert sum("loss scaling from 4096" in line for line in one["decisions"]) == 1
    assert [audit["problems"] for audit in one["audits"]] == [[]]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        pytest.param("veomni", {"optimizer": "muon"}, id="a container of Muon and AdamW"),
        pytest.param("veomni", {"experts": True}, id="VeOmni's own experts"),
        pytest.param("automodel", {"experts": True}, id="experts of transformers"),
        pytest.param("torchtitan", {}, marks=needs_titan),
        pytest.param("fsdp_turbo", {}, marks=needs_turbo),
    ],
)
def test_one_rank_equals_a_loop_by_hand(
    engine_ranks: Ranks, of_experts: str, name: str, fields: dict[str, Any]
) -> None:
    given = dict(fields)
    if given.pop("experts", False):
        given["model"] = of_experts
    (one,) = engine_ranks("equal", world=1, name=name, **given)
    same(one, one["hand"])
    assert one["lost"].keys() >= {"updates_lost"}  # the meter ran, and changed no step
    assert ("Qwen3MoeExperts" in one["kinds"]) == ("model" in given)


def test_an_auxiliary_loss_is_scaled_as_the_loss_is(engine_ranks: Ranks) -> None:
    """Automodel adds an auxiliary loss's gradients, times a number that verl sets in each batch."""
    (plain,) = engine_ranks("by_hand", world=1, name="automodel")
    (one,) = engine_ranks("equal", world=1, name="automodel", auxiliary=True)
    same(one, one["hand"])
    assert one["state"]["parameters"] != plain["state"]["parameters"]


@pytest.mark.parametrize("name", ENGINES)
def test_bf16_and_fp32_are_untouched(engine_ranks: Ranks, name: str) -> None:
    for one in engine_ranks("unscaled", world=1, name=name):
        for dtype in ("bfloat16", "float32"):
            assert one[f"{dtype} on"] == one[f"{dtype} off"]
        assert one["decisions"] == []


# -- resuming ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "experts"),
    [(name, False) for name in ENGINES] + [(name, True) for name in ENGINES if name in PARALLEL],
)
def test_two_ranks_equal_a_loop_by_hand_and_resume(
    engine_ranks: Ranks, of_experts: str, name: str, experts: bool, tmp_path: Path
) -> None:
    """Both ranks skip the same two steps; a resume in new processes continues bit for bit."""
    given = {"model": of_experts, **PARALLEL[name]} if experts else {}
    told = {"name": name, "at": 4, "overflows": [2, 5], **given}
    hand = engine_ranks("by_hand", name=name, **given)
    straight = engine_ranks("saved", folder=tmp_path, **told)
    gone_on = engine_ranks("resumed", folder=tmp_path, **told)
    for ours, theirs, second in zip(straight, hand, gone_on, strict=True):
        same(ours, theirs)
        assert ours["after"] == ours["before"]
        assert second["loaded"] == ours["before"]
        assert second["state"] == ours["state"]
        assert experts or second["warned"] == []  # of weights that Automodel rounds
        assert second["predicted"] == "exact"
    for key in ("scale", "tracker", "counter"):
        assert straight[0]["state"][key] == straight[1]["state"][key]
    assert straight[0]["state"]["parameters"] != straight[1]["state"]["parameters"]


@pytest.mark.parametrize("name", [one for one in ENGINES if one in ("automodel", "torchtitan")])
def test_saved_before_the_first_step_that_is_not_skipped(
    engine_ranks: Ranks, name: str, tmp_path: Path
) -> None:
    """An optimizer without states gets states at the save, which must not count as a step."""
    told = {"name": name, "at": 2, "overflows": [0, 1, 5]}
    straight = engine_ranks("saved", folder=tmp_path, **told)
    for ours, second in zip(
        straight, engine_ranks("resumed", folder=tmp_path, **told), strict=True
    ):
        assert ours["after"]["counter"] == [2, 2, 2]
        assert ours["state"]["counts"] == [5.0]
        assert second["state"] == ours["state"]
        assert second["warned"] == []


# -- in Ray actors -----------------------------------------------------------------------------


@pytest.mark.usefixtures("start_up_file")
@pytest.mark.timeout(900)
def test_workers_in_ray_train_skip_save_and_resume(ray_drivers: Ranks, tmp_path: Path) -> None:
    """PRECISION_SHIM=1 alone brings the shim into verl's own training workers of all engines."""
    from .engine_support import make_model

    driver = Path(__file__).with_name("ray_driver.py")
    given = (",".join(ENGINES), make_model(tmp_path / "model"), tmp_path)
    settings = {"PRECISION_SHIM": "1", "PRECISION_SHIM_LOSS_SCALE_INIT": "1024"}
    found = drive(ray_drivers, driver, *given, timeout=800, **settings)
    assert list(found) == ENGINES
    for name, one in found.items():
        trained_skipped_and_resumed(one, [1024, 1024, 512, 512, 512, 256])
        assert str(one["again"]) == str(one["on"])  # as text, because NaN != NaN
        for rank in one["start"]:
            assert rank["engine"].startswith(SHOWN[name])
            assert any(SHOWN[name] in target for target in rank["wrapped"])


# -- refusals and warnings ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(engine_ranks: Ranks) -> Any:
    """The errors and warnings of the engines' builds, by case."""
    asked: dict[str, Any] = {
        "veomni": ["veomni", {"mixed_precision": False}],
        "megatron_fsdp": ["automodel", {"distributed_strategy": "megatron_fsdp"}],
        "ddp": ["automodel", {"distributed_strategy": "ddp"}],
        "output": ["automodel", {"mp_output_dtype": "bfloat16"}],
        "states": ["automodel", {"model_dtype": "fp16"}],
        "other key": ["automodel", {"mp_param_dtype": "bf16", "mp_reduce_dtype": "fp16"}],
        "unread": ["automodel", {"dtype": "bfloat16", "own": {"dtype": "float16"}}],
        **({"fp32": ["torchtitan", {"dtype": "float32"}]} if "torchtitan" in ENGINES else {}),
        "reference": ["veomni", {"forward_only": True}],
        "fine": ["automodel", {"mp_output_dtype": "fp32"}],
    }
    (found, _) = engine_ranks("built", world=2, asked=list(asked.values()))
    return dict(zip(asked, found, strict=True))


@pytest.mark.parametrize(
    ("case", "key"),
    [
        ("veomni", "mixed_precision"),
        ("megatron_fsdp", "distributed_strategy"),
        ("ddp", "distributed_strategy"),
        ("output", "mp_output_dtype"),
        ("states", "model_dtype"),
    ],
)
def test_refused_before_the_optimizer_is_built(built: Any, case: str, key: str) -> None:
    assert built[case]["error"].startswith("DtypeError: verl 0.")
    assert f"Set engine_config.{key}=" in built[case]["error"]
    assert built[case]["optimizers"] == 0


def test_a_dtype_without_effect_is_said(built: Any) -> None:
    told = {
        "other key": "mp_reduce_dtype=float16 is no fp16 training here",
        "unread": "fsdp_config.dtype=float16 has no effect: the layers compute in bf16",
        "fp32": "torchtitan.dtype=float32 has no effect: the layers compute in bf16",
    }
    for case in told.keys() & built.keys():
        (said,) = built[case]["said"]
        assert told[case] in said
    assert built["other key"]["scaler"] == "NoneType"
    assert "Write fsdp_config.mp_param_dtype=fp16" in built["unread"]["said"][0]


def test_rounded_weights_are_said(engine_ranks: Ranks, of_experts: str) -> None:
    """verl's default of ``model_dtype`` is fp32; Automodel's own models have bf16 weights."""
    asked = [["automodel", PARALLEL["automodel"]]]
    (ours, _) = engine_ranks("built", model=of_experts, asked=asked)
    (said,) = ours[0]["said"]
    assert "model_dtype='fp32', but the weights of" in said
    assert "torch.bfloat16" in said
    (alone,) = engine_ranks("built", world=1, model=of_experts, asked=[["automodel", {}]])
    assert alone[0]["said"] == []


def test_what_is_fine_is_left_as_it_is(built: Any) -> None:
    """A reference model, which computes in fp16 without a scaler, and an output in fp32."""
    assert built["reference"]["policy"] == "torch.float16"
    assert built["reference"]["scaler"] == "NoneType"
    assert built["fine"]["scaler"] == "LossScaler"
    assert built["fine"]["said"] == []


@needs_titan
def test_torchtitan_without_its_adapter_is_refused(engine_ranks: Ranks) -> None:
    ((found,),) = engine_ranks("built", world=1, asked=[["torchtitan", {}]], frameworks=["verl"])
    assert "PRECISION_SHIM_FRAMEWORKS" in found["error"]
    assert found["optimizers"] == 0


@needs_titan
def test_a_checkpoint_that_torchtitan_leaves_out_is_said(engine_ranks: Ranks) -> None:
    ((said,),) = engine_ranks("unsaved", world=1)
    assert "save_checkpoint(global_step=10) writes nothing" in said
    assert "trainer.save_freq" in said
